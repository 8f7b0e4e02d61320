"""Causal attention inside the documents of a pack by the flash-attn package, which importing this module needs.

Names, signatures and shape legend are those of `bailing_mtp.kernels.attention`.
"""

import torch.nn.functional as F
from flash_attn import flash_attn_varlen_func
from torch import Tensor

from bailing_mtp.kernels import attention
from bailing_mtp.kernels.attention import document_bounds


def packed_causal_attention(
    q_Thd: Tensor, k_Thd: Tensor, v_Thv: Tensor, lengths: tuple[int, ...], scale: float
) -> Tensor:
    """Softmax attention of each token to its own document up to itself; values are padded to the keys' size."""
    if not q_Thd.shape[0]:
        return attention.packed_causal_attention(q_Thd, k_Thd, v_Thv, lengths, scale)
    bounds, longest, missing = document_bounds(lengths, q_Thd.device), max(lengths), q_Thd.shape[-1] - v_Thv.shape[-1]
    o_Thd = flash_attn_varlen_func(
        q_Thd,
        k_Thd,
        F.pad(v_Thv, (0, missing)),
        cu_seqlens_q=bounds,
        cu_seqlens_k=bounds,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        softmax_scale=scale,
        causal=True,
    )
    return o_Thd[..., : v_Thv.shape[-1]]


def chained_causal_attention(
    q_Thd: Tensor,
    k_Thd: Tensor,
    v_Thv: Tensor,
    chain: tuple[tuple[Tensor, Tensor], ...],
    lengths: tuple[int, ...],
    scale: float,
) -> Tensor:
    """Without a chain as above. With one, torch's kernel: the package does not take a joined log-sum-exp."""
    if not chain:
        return packed_causal_attention(q_Thd, k_Thd, v_Thv, lengths, scale)
    return attention.chained_causal_attention(q_Thd, k_Thd, v_Thv, chain, lengths, scale)
