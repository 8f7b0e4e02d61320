"""Causal attention of packed segments whose keys begin before their queries, in plain torch.

Shape legend: T query tokens of a pack, X key tokens of a pack (each segment's prefix and its own tokens),
h heads of this rank, d channels of a query or key head, v channels of a value head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from bailing_mtp.kernels.reference.attention import packed_causal_attention


def prefix_causal_attention(
    q_Thd: Tensor,
    k_Xhd: Tensor,
    v_Xhv: Tensor,
    lengths: tuple[int, ...],
    key_lengths: tuple[int, ...],
    scale: float,
) -> Tensor:
    """The last `lengths[i]` of the `key_lengths[i]` tokens of segment i attend up to themselves: [T, h, v].

    Lengths are on the host, in tokens; without prefixes this is packed_causal_attention.
    """
    if lengths == key_lengths:
        return packed_causal_attention(q_Thd, k_Xhd, v_Xhv, lengths, scale)
    outputs = []
    for q_lhd, k_xhd, v_xhv in zip(
        q_Thd.split(lengths), k_Xhd.split(key_lengths), v_Xhv.split(key_lengths), strict=True
    ):
        mask = causal_lower_right(q_lhd.shape[0], k_xhd.shape[0])
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_lhd, k_xhd, v_xhv))
        o_1hlv = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        outputs.append(o_1hlv[0].transpose(0, 1))
    return torch.cat(outputs)
