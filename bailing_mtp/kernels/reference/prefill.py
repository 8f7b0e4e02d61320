"""The prefill kernel set in plain torch: what a prefill calls beside the decode kernels, by the names of its GPU
counterpart.
"""

from torch import Tensor

from bailing_mtp.kernels.reference.experts import experts
from bailing_mtp.kernels.reference.kda_prefill import Pack, gated_delta_rule, gated_norm, short_conv_qkv
from bailing_mtp.kernels.reference.prefix_attention import prefix_causal_attention

__all__ = ["attend", "experts", "gated_delta_rule", "gated_norm", "short_conv_qkv"]


def attend(q_Thd: Tensor, k_Xhd: Tensor, v_Xhv: Tensor, pack: Pack, scale: float) -> Tensor:
    """Each token attends to its sequence up to itself, prefix included: [T, h, v]."""
    return prefix_causal_attention(q_Thd, k_Xhd, v_Xhv, pack.lengths, pack.key_lengths, scale)
