"""Pre-train an ERNIE encoder: ``python pretrain_ernie.py --help``, or ``megapar pretrain ernie``."""

from megapar.tools.pretrain import pretrain

if __name__ == "__main__":
    pretrain("ernie")
