"""`python -m dessilbi.cli`, for `torchrun -m dessilbi.cli` and where the script is not on the PATH."""

import sys

from dessilbi.cli import main

if __name__ == "__main__":  # worker processes import this file as well
    sys.exit(main())
