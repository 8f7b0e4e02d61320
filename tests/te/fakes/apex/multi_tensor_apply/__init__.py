from collections.abc import Callable
from typing import Any

from torch import Tensor


def multi_tensor_applier(op: Callable[..., Any], noop_flag: Tensor, tensor_lists: list, *args: Any) -> Any:
    return op(2048 * 32, noop_flag, tensor_lists, *args)
