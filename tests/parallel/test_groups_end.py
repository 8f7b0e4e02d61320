"""Process groups and their threads end with the layout that made them."""

from pathlib import Path

import pytest

from tests.distributed.worlds import layout

THREADS = Path("/proc/self/task")


@pytest.mark.skipif(not THREADS.is_dir(), reason="counts threads by /proc")
def test_layouts_one_after_another_leave_no_threads():
    counts = []
    for _ in range(4):
        with layout(tp=1, ep=1):
            inside = len(list(THREADS.iterdir()))
        counts.append(len(list(THREADS.iterdir())))
    assert counts[-1] <= counts[0] < inside
