"""What megatron-core takes from transformer-engine or apex because they can be imported, decided by the config.

Each of its modules looks for both when it is imported, and the first that it finds replaces torch: Adam, the kernels
of gradient norms and clipping, the router's product. A run must not change because a package was installed.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def choose_fused(fused: Literal["none", "apex"]) -> None:
    """Let megatron-core use torch's functions, or apex's in the optimizer, from now on in this process.

    The router's product is torch's either way. ImportError when apex is asked for and absent.
    """
    from megatron.core import optimizer, utils
    from megatron.core.optimizer import clip_grads
    from megatron.core.optimizer import optimizer as mixed_precision
    from megatron.core.transformer.moe import moe_utils

    if fused == "apex":
        import amp_C
        from apex.multi_tensor_apply import multi_tensor_applier
        from apex.optimizers import FusedAdam

        adam, applier = FusedAdam, multi_tensor_applier
        norm, scale = amp_C.multi_tensor_l2norm, amp_C.multi_tensor_scale
    else:
        adam, applier = torch.optim.AdamW, utils.local_multi_tensor_applier
        norm, scale = _norm, _scale
    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = adam, fused == "none"
    for module in (clip_grads, mixed_precision):
        module.multi_tensor_applier, module.multi_tensor_scale_impl = applier, scale
    clip_grads.l2_norm_impl = norm
    # With transformer-engine's, norms are tensors, and clipping takes nothing else.
    clip_grads.multi_tensor_scale_tensor_impl = None
    moe_utils.te_general_gemm = None


def _norm(_chunk: int, _overflow: Tensor, tensors: list[list[Tensor]], _each: bool) -> tuple[Tensor, None]:
    """The norm of all tensors, [1], as amp_C.multi_tensor_l2norm gives it; megatron-core's own reads one number a
    tensor on the host."""
    return torch.stack(torch._foreach_norm(tensors[0])).norm().view(1), None


def _scale(_chunk: int, _overflow: Tensor, tensors: list[list[Tensor]], factor: float) -> None:
    """Targets = sources * factor, as amp_C.multi_tensor_scale; megatron-core's own makes a copy of each in between."""
    sources, targets = tensors
    if sources is not targets:
        torch._foreach_copy_(targets, sources)
    if factor != 1.0:
        torch._foreach_mul_(targets, factor)
