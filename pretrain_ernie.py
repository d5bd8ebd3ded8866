"""Pre-train an ERNIE encoder: ``python pretrain_ernie.py --help``."""

from megapar.arguments import parse_or_exit
from megapar.training.sizes import outline

if __name__ == "__main__":
    config = parse_or_exit("ernie", outline=outline)

    from megapar.planning.held import planned_memory
    from megapar.trainer import main  # torch is imported only once the configuration is accepted

    main(config, planned_memory)
