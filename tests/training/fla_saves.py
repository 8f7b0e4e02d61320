"""Stand-in for kernels.kda that keeps for the backward what fla's functions keep, without computing anything.

fla 0.6: CausalConv1dFunction and ChunkKDAFunction (gate inside the kernel, everything else computed again).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

CHUNK_TOKENS = 64


class _Conv(Function):
    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, weight_CW: Tensor) -> Tensor:
        ctx.save_for_backward(x_TC, weight_CW)
        return torch.empty_like(x_TC, memory_format=torch.contiguous_format)


class _ChunkKda(Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        q, k, v, f, beta, A_log, dt_bias = (x.contiguous() for x in inputs)
        normalised = [torch.empty_like(x) for x in (q, k)]
        roots = [torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) for x in (q, k)]
        triangles = [torch.empty(*k.shape[:-1], CHUNK_TOKENS, dtype=k.dtype, device=k.device) for _ in range(2)]
        ctx.save_for_backward(*normalised, *roots, v, f, beta, A_log, dt_bias, *triangles)
        return torch.empty_like(v)


def short_conv(x_TC: Tensor, weight_CW: Tensor, cu_seqlens: Tensor, lengths: tuple[int, ...]) -> Tensor:
    return _Conv.apply(x_TC, weight_CW)


def gated_chunk_kda(q: Tensor, k: Tensor, v: Tensor, f: Tensor, beta_Th: Tensor, A_log: Tensor, dt_bias: Tensor,
                    lower_bound: float | None, cu_seqlens: Tensor, lengths: tuple[int, ...]) -> Tensor:  # fmt: skip
    return _ChunkKda.apply(q, k, v, f, beta_Th.float().sigmoid(), A_log, dt_bias)
