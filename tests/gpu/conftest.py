"""One process group of one GPU for the tests of a file, which are skipped where there is none.

fla, which reads its settings when it is imported, is given those that ship.
"""

import os
from collections.abc import Iterator

import pytest
import torch

from bailing_mtp.parallel.context import ParallelContext, build_context, destroy_context
from recipes.kernel_settings import fla_settings

if torch.cuda.is_available():
    for _name, _value in fla_settings(torch.cuda.get_device_capability(), "bf16").items():
        os.environ.setdefault(_name, _value)


@pytest.fixture(scope="module")
def context() -> Iterator[ParallelContext]:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    torch.backends.cuda.matmul.allow_tf32 = False
    yield build_context(1, 1, seed=0, device_type="cuda")
    destroy_context()
