"""``python -m megapar``: the ``megapar`` command for environments whose scripts are not on the PATH."""

import sys

from megapar.tools.main import main

if __name__ == "__main__":
    sys.exit(main())
