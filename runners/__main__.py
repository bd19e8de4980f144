"""`python -m runners` is the command `assay`."""

import sys

from runners.cli import console

sys.exit(console())
