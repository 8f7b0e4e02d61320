"""apex's product that adds to the fp32 gradient buffer. CALLS counts it."""

from collections import Counter

from torch import Tensor

CALLS: Counter[str] = Counter()


def wgrad_gemm_accum_fp32(x: Tensor, grad: Tensor, main_grad: Tensor) -> None:
    CALLS["wgrad"] += 1
    main_grad.add_(grad.flatten(0, -2).t() @ x.flatten(0, -2))
