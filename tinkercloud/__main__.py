"""`python -m tinkercloud` is `tinkercloud`."""

import sys

from tinkercloud.cli import main

if __name__ == "__main__":
    sys.exit(main())
