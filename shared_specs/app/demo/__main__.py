"""`python -m shared_specs.app.demo`; see run.py."""

import sys

from shared_specs.app.demo.run import main

sys.exit(main(sys.argv[1:]))
