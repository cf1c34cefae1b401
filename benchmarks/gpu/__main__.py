"""`python -m benchmarks.gpu`: see `benchmarks.gpu.report`."""

import sys

from benchmarks.gpu.report import main

sys.exit(main())
