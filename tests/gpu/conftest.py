"""One process group of one GPU for the tests of a file, which are skipped where there is none."""

from collections.abc import Iterator

import pytest
import torch

from bailing_mtp.parallel.context import ParallelContext, build_context, destroy_context


@pytest.fixture(scope="module")
def context() -> Iterator[ParallelContext]:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    torch.backends.cuda.matmul.allow_tf32 = False
    yield build_context(1, 1, seed=0, device_type="cuda")
    destroy_context()
