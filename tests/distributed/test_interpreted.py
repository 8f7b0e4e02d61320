"""The Triton kernels where two ranks share heads, vocabulary or experts, on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.distributed.interpreted import DONE, LAYOUTS

ROOT = Path(__file__).resolve().parents[2]


def test_two_ranks_by_interpreted_kernels():
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "tests.distributed.interpreted",
    ]  # fmt: skip
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert all(f"{DONE} tp{tp} ep{ep}" in run.stdout for tp, ep in LAYOUTS), run.stdout[-2000:] + run.stderr[-6000:]
