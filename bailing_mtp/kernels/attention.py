"""Causal attention inside the documents of a pack on a GPU, by torch's own fused kernels.

Names, signatures and shape legend are those of the torch twin, `bailing_mtp.kernels.reference.attention`. Inputs
that the fused kernels do not take (fp32, the CPU, an empty pack) go to the twin.
"""

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from bailing_mtp.kernels.reference import attention as reference

FUSED_DTYPES = (torch.bfloat16, torch.float16)
EQUAL_LENGTHS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
"""Of these cuDNN's is the fastest for heads of 192 and 128, but it plans anew for every length."""


def packed_causal_attention(
    q_Thd: Tensor, k_Thd: Tensor, v_Thv: Tensor, lengths: tuple[int, ...], scale: float
) -> Tensor:
    """As the twin, which keeps every score; documents of one length are a batch, others go as they lie."""
    if not _takes(q_Thd):
        return reference.packed_causal_attention(q_Thd, k_Thd, v_Thv, lengths, scale)
    assert sum(lengths) == q_Thd.shape[0], f"lengths sum to {sum(lengths)}, T is {q_Thd.shape[0]}"
    if len(set(lengths)) > 1:
        return _Varlen.apply(lengths, scale, q_Thd, k_Thd, v_Thv)
    q_nhld, k_nhld, v_nhlv = (x.unflatten(0, (len(lengths), -1)).transpose(1, 2) for x in (q_Thd, k_Thd, v_Thv))
    with sdpa_kernel(EQUAL_LENGTHS, set_priority=True):
        o_nhlv = F.scaled_dot_product_attention(q_nhld, k_nhld, v_nhlv, is_causal=True, scale=scale)
    return o_nhlv.transpose(1, 2).flatten(0, 1)


def chained_causal_attention(
    q_Thd: Tensor,
    k_Thd: Tensor,
    v_Thv: Tensor,
    chain: tuple[tuple[Tensor, Tensor], ...],
    lengths: tuple[int, ...],
    scale: float,
) -> Tensor:
    """As the twin, without holding scores."""
    if not chain:
        return packed_causal_attention(q_Thd, k_Thd, v_Thv, lengths, scale)
    if not _takes(q_Thd):
        return reference.chained_causal_attention(q_Thd, k_Thd, v_Thv, chain, lengths, scale)
    return _Varlen.apply(lengths, scale, q_Thd, k_Thd, v_Thv, *(x for row in chain for x in row))


def _takes(q_Thd: Tensor) -> bool:
    return q_Thd.is_cuda and q_Thd.dtype in FUSED_DTYPES and q_Thd.shape[0] > 0


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # a cached inference tensor could not be used in a later backward
def document_bounds(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 prefix sums [N+1]; made once for all layers, and without waiting for the device."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device, non_blocking=True)


class _Varlen(torch.autograd.Function):
    """torch's flash attention over documents as they lie, joined with the rows of a chain, if there are any.

    The kernel wants one head size, so values are padded to the keys'. Its backward is called with the *joined*
    output and log-sum-exp, as in ring attention: then weights, and the share of each part, are those of the one
    softmax (see the twin).
    """

    @staticmethod
    def forward(
        ctx: Any, lengths: tuple[int, ...], scale: float, q_Thd: Tensor, k_Thd: Tensor, v_Thv: Tensor, *chain: Tensor
    ) -> Tensor:
        cu_seqlens, longest, n_values = document_bounds(lengths, q_Thd.device), max(lengths), v_Thv.shape[-1]
        q_Thd, k_Thd, padded_Thd = q_Thd.contiguous(), k_Thd.contiguous(), _padded(v_Thv, q_Thd.shape[-1])
        o_Thd, lse_hT, *seeds = torch.ops.aten._flash_attention_forward(
            q_Thd, k_Thd, padded_Thd, cu_seqlens, cu_seqlens, longest, longest, 0.0, True, False, scale=scale
        )
        o_Thv = o_Thd[..., :n_values]
        if chain:
            o_Thv, lse_hT = _join(o_Thv, lse_hT, q_Thd, chain, scale)
        ctx.scale, ctx.longest = scale, longest
        ctx.save_for_backward(q_Thd, k_Thd, v_Thv, o_Thv, lse_hT, cu_seqlens, seeds[0], seeds[1], *chain)
        return o_Thv

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_Thv: Tensor) -> tuple[Tensor | None, ...]:
        q_Thd, k_Thd, v_Thv, o_Thv, lse_hT, cu_seqlens, seed, offset, *chain = ctx.saved_tensors
        d, n_values = q_Thd.shape[-1], v_Thv.shape[-1]
        q_grad, k_grad, padded_grad = torch.ops.aten._flash_attention_backward(
            _padded(grad_Thv, d), q_Thd, k_Thd, _padded(v_Thv, d), _padded(o_Thv, d), lse_hT, cu_seqlens, cu_seqlens,
            ctx.longest, ctx.longest, 0.0, True, seed, offset, scale=ctx.scale,
        )  # fmt: skip
        v_grad = padded_grad[..., :n_values]
        if not chain:
            return None, None, q_grad, k_grad, v_grad
        q, grad, lse_Th = q_Thd.float(), grad_Thv.float(), lse_hT.t()
        shared_Th1 = (grad * o_Thv.float()).sum(-1, keepdim=True)
        q_total, chain_grads = q_grad.float(), []
        for key, value in zip(chain[::2], chain[1::2], strict=True):
            weight_Th1 = torch.exp((q * key).sum(-1) * ctx.scale - lse_Th).unsqueeze(-1)
            score_grad_Th1 = weight_Th1 * ((grad * value).sum(-1, keepdim=True) - shared_Th1) * ctx.scale
            q_total += score_grad_Th1 * key
            chain_grads += [(score_grad_Th1 * q).to(key.dtype), (weight_Th1 * grad).to(value.dtype)]
        return None, None, q_total.to(q_Thd.dtype), k_grad, v_grad, *chain_grads


def _padded(x_Thv: Tensor, size: int) -> Tensor:
    missing = size - x_Thv.shape[-1]
    assert missing >= 0, "values are at most as wide as keys"
    return F.pad(x_Thv, (0, missing)) if missing else x_Thv.contiguous()


def _join(
    o_Thv: Tensor, lse_hT: Tensor, q_Thd: Tensor, chain: tuple[Tensor, ...], scale: float
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the documents' keys and the chain's rows together."""
    q, keys, values = q_Thd.float(), chain[::2], chain[1::2]
    scores = [(q * key).sum(-1) * scale for key in keys]
    own_lse_Th = lse_hT.t()
    lse_Th = torch.stack((own_lse_Th, *scores)).logsumexp(0)
    joined = o_Thv.float() * torch.exp(own_lse_Th - lse_Th).unsqueeze(-1)
    for score_Th, value in zip(scores, values, strict=True):
        joined += torch.exp(score_Th - lse_Th).unsqueeze(-1) * value
    return joined.to(o_Thv.dtype), lse_Th.t().contiguous()
