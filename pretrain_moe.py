"""Pre-train a mixture-of-experts (or dense) decoder: ``python pretrain_moe.py --help``, or ``megapar pretrain moe``."""

from megapar.tools.pretrain import pretrain

if __name__ == "__main__":
    pretrain("moe")
