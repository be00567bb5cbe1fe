from __future__ import annotations

import sys

from dcil.cli import main

sys.exit(main())
