"""The paper's tables: printed numbers, the runs trained for them, their records, and the page that compares both.

Reading order: paper (printed numbers), cells (what is trained for one), tables (cells by table); session (one run,
observed by probe), pool (many runs within a time budget), estimate (their time); records (what is kept of a run),
revisions (what has changed since), matching, comparison; sections, mask_age, iterations, figures and report (the
results page).
"""

from __future__ import annotations
