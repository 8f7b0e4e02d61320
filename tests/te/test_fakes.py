"""The transformer-engine backend and apex's pieces on stand-ins, in a process that finds those packages from the start:
megatron-core looks for them when it is imported."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_te_and_apex_on_stand_ins() -> None:
    cases = [str(path) for path in sorted(HERE.glob("cases_*.py"))]
    path = os.pathsep.join([str(HERE / "fakes"), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *cases],
        env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert len(cases) == 2 and run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
