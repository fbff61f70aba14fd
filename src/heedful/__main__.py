"""`python -m heedful` is `heedful`: what torchrun starts."""

import sys

from heedful.cli import main

sys.exit(main())
