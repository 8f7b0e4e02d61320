"""Recomputation under the name that megatron-core looks for."""

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

RECOMPUTED: list[Callable[..., Any]] = []


class CudaRNGStatesTracker:
    pass


def activation_recompute_forward(*_: Any, **__: Any) -> None:
    raise AssertionError("part of the distributed checkpoint of megatron-core, which is not used")


def checkpoint(function: Callable[..., Any], *args: Any, **_: Any) -> Any:
    RECOMPUTED.append(function)
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)
