from __future__ import annotations

import sys

from dcil_runtime.cli import main

sys.exit(main())
