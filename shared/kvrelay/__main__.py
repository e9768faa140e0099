"""`python -m kvrelay` is the `kvrelay` command."""

import sys

from kvrelay.cli.main import main

sys.exit(main())
