"""The paper's tables: what was printed, what is trained for each number, the records of that, and the page about them.

Reading order: paper (the printed numbers), cells (what to train for one), tables (cells by table), session (one run,
watched by watch), pool (many runs within a time budget), record (what is kept of a run), compare and report (the page).
"""

from __future__ import annotations
