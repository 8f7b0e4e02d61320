"""These tests run Triton kernels on the CPU, which must be decided before the first kernel is defined.

`tests/kernels/test_triton.py` runs them in a process of their own; elsewhere nothing here is collected.
"""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
