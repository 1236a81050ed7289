"""`python -m graphflow`: the command line, for when its script is not on the path."""

import sys

from graphflow.cli.main import main

sys.exit(main())
