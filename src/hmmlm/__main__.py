"""`python -m hmmlm`: the command line where the package is not installed but on the path."""

import sys

from hmmlm.cli.main import main

sys.exit(main())
