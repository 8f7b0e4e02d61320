"""A rank that waits for another one for too long ends, and says who it is and where it stood."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import time
from bailing_mtp.parallel.context import build_context
from recipes.failure import user_errors
from recipes.ranks import Ranks

ranks = Ranks.from_environment()
with user_errors(ranks):
    context = build_context(1, 1, 0, "cpu", timeout_s=2.0)
    context.barrier()
    if context.rank:
        time.sleep(60)
    context.sum_over_dp([1.0])
"""


def test_a_collective_that_waits_too_long_ends_with_rank_and_phase(tmp_path: Path):
    (tmp_path / "waits.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [*command, str(tmp_path / "waits.py")], env=env, capture_output=True, text=True, timeout=55, check=False
    )
    assert run.returncode != 0 and "on rank 0 (" in run.stderr, run.stderr[-2000:]
    assert ", in sum_over_dp of bailing_mtp/parallel/context.py" in run.stderr
