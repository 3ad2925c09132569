"""`python -m kvstrata.cli`."""

import sys

from kvstrata.cli.main import main

sys.exit(main())
