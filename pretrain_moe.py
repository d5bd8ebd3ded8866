"""Pre-train a mixture-of-experts (or dense) decoder: ``python pretrain_moe.py --help``."""

import signal

from megapar.arguments import parse_or_exit
from megapar.core.health.parent import end_with_launcher
from megapar.training.building.outline import outline

if __name__ == "__main__":
    end_with_launcher()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until training starts; from then on Ctrl-C saves and stops
    config = parse_or_exit("moe", outline=outline)

    from megapar.planning.out_of_memory import planned_memory
    from megapar.trainer import main  # imports torch, so only after the configuration is accepted

    main(config, planned_memory)
