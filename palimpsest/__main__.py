"""`python -m palimpsest`."""

import sys

from palimpsest.cli import main

sys.exit(main())
