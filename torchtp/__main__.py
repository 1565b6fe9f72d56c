"""`python -m torchtp`: the command `torchtp`."""

import sys

from torchtp.cli import main

sys.exit(main())
