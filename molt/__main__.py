"""`python -m molt` is the console script `molt`."""

import sys

from molt.cli.main import main

sys.exit(main())
