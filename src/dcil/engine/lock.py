"""The lock of work that only one run of a process may do at a time.

Several runs can train in threads of one process (``dcil.train.parallel``). What they must not do at the same time:

* build a network, because initial weights come from torch's global random numbers;
* trace a network, because torch redirects the module calls of all threads while it traces;
* record a CUDA graph, or run anything for the first time: cuDNN then compares algorithms, for which it waits for the
  whole device, and that invalidates the recording of another thread.
"""

from __future__ import annotations

import threading

PROCESS_LOCK = threading.RLock()
