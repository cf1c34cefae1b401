"""`python -m lab.bench.gpu`: see `lab.bench.gpu.report`."""

import sys

from lab.bench.gpu.report import main

sys.exit(main())
