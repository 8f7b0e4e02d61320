"""Two ranks over NCCL against one GPU, in one launch; the cases stand in tests/gpu/cases_two.py."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.suite import DONE
from tests.distributed.test_ranks import launch_suite
from tests.distributed.worlds import layout, reference
from tests.gpu.cases_two import CASES

pytestmark = pytest.mark.gpu
LIMIT_S = 600


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    scratch = tmp_path_factory.mktemp("two_gpus")
    with layout(tp=1, ep=1) as context:
        torch.save(reference(context), scratch / "reference.pt")
    return launch_suite(2, scratch / "reference.pt", scratch, LIMIT_S)


@pytest.mark.timeout(LIMIT_S + 120)
@pytest.mark.parametrize("name", CASES[2])
def test_case(output: str, name: str):
    assert f"{DONE} {name} " in output, f"not finished; the launch printed:\n{output[-6000:]}"
