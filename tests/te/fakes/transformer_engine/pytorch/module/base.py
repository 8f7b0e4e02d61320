"""The gradient that nobody reads, beside one that was added to its buffer in place."""

import torch
from torch import Tensor


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    return torch.full(shape, 0.0 if zero else float("nan"), dtype=dtype)
