"""Runs the tests of the Triton kernels under the interpreter, in a process where no kernel is defined yet."""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "interpreted"


def test_kernels_under_the_interpreter() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(FOLDER)],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
