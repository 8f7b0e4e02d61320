"""Two and four gloo ranks against one process; the cases stand in tests/distributed/cases.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.distributed.cases import CASES
from tests.distributed.suite import DONE
from tests.distributed.worlds import layout, reference

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 1200


@pytest.fixture(scope="session")
def reference_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("reference") / "reference.pt"
    with layout(tp=1, ep=1) as context:
        torch.save(reference(context), file)
    return file


@pytest.fixture(scope="session")
def launches(reference_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """World size -> output of its one launch."""
    return {
        world_size: launch_suite(
            world_size, reference_file, tmp_path_factory.mktemp(f"world{world_size}"), LIMIT_S, CUDA_VISIBLE_DEVICES=""
        )
        for world_size in CASES
    }


def launch_suite(world_size: int, reference_file: Path, scratch: Path, limit_s: float, **environment: str) -> str:
    """What all cases of a world size print."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size),
        "-m", "tests.distributed.suite", str(reference_file), str(scratch),
    ]  # fmt: skip
    log = scratch / "launch.log"
    with log.open("w") as file:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        run = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            run.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            run.terminate()
            run.wait()
            file.write(f"ended after {limit_s} s\n")
    return log.read_text(errors="replace")


@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize(("world_size", "name"), [(n, name) for n, cases in CASES.items() for name in cases])
def test_case(launches: dict[int, str], world_size: int, name: str):
    output = launches[world_size]
    assert f"{DONE} {name} " in output, f"not finished; the launch printed:\n{output[-6000:]}"
