"""The prefill kernel set of a GPU in bf16: fla's chunked delta rule, torch's flash attention over packed segments,
grouped GEMMs, and Triton between them. Importing this module takes seconds (fla).

Names and shapes are those of kernels.reference.prefill. No call waits for the device.
"""

import torch
import torch.nn.functional as F
from fla.modules.norm.l2norm import l2norm_fwd
from fla.ops.kda.chunk_fwd import chunk_kda_fwd
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from bailing_mtp.kernels.reference.experts import SharedExpert
from bailing_mtp.kernels.reference.kda_prefill import CHUNK_TOKENS, Pack
from bailing_mtp.kernels.triton.experts import experts as experts_of_few_rows
from bailing_mtp.kernels.triton.experts_grouped import experts_grouped
from bailing_mtp.kernels.triton.kda_prefill import gated_norm, short_conv_qkv

__all__ = ["attend", "experts", "gated_delta_rule", "gated_norm", "short_conv_qkv"]

MANY_ROWS = 1024
"""Rows from which grouped GEMMs compute the experts, and not the decode kernel."""
FLASH_CHANNELS = 8
"""Flash attention takes head sizes in multiples of this, one for queries, keys and values."""


def gated_delta_rule(
    q_Tx: Tensor,
    k_Tx: Tensor,
    v_Tx: Tensor,
    f_Tx: Tensor,
    beta_Th: Tensor,
    A_log_h: Tensor,
    dt_bias_hD: Tensor,
    lower_bound: float | None,
    pack: Pack,
    state_shVD: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As the twin. Calls the forward of fla's chunk_kda itself, whose public function builds its table of chunks
    on the host, and then waits for the device, in every prefill.
    """
    heads, D = dt_bias_hD.shape
    q_1ThD, k_1ThD, v_1ThV, f_1ThD = (
        x.contiguous().view(1, x.shape[0], heads, -1) for x in (q_Tx, k_Tx, v_Tx, f_Tx)
    )
    result = chunk_kda_fwd(
        q=l2norm_fwd(q_1ThD)[0],
        k=l2norm_fwd(k_1ThD)[0],
        v=v_1ThV,
        g=f_1ThD,
        beta=beta_Th.float().sigmoid().unsqueeze(0),
        scale=D**-0.5,
        initial_state=state_shVD,
        output_final_state=True,
        state_v_first=True,
        cu_seqlens=pack.cu_seqlens,
        chunk_indices=pack.chunks_M2,
        chunk_offsets=pack.chunk_offsets,
        chunk_size=CHUNK_TOKENS,
        # The tensor-core form of the products inside a chunk overflows below a log decay of -5.
        safe_gate=lower_bound is not None and lower_bound >= -5,
        lower_bound=lower_bound,
        use_gate_in_kernel=True,
        A_log=A_log_h,
        dt_bias=dt_bias_hD.reshape(-1),
    )
    return result[0][0], result[1]


def attend(q_Thd: Tensor, k_Xhd: Tensor, v_Xhv: Tensor, pack: Pack, scale: float) -> Tensor:
    """As the twin, by flash attention, whose causal mask is aligned to the last key of each segment.

    It is the backend that takes all segments in one call, with and without prefixes: cuDNN's is faster on one long
    document, and has no such mask.
    """
    assert q_Thd.dtype in (torch.bfloat16, torch.float16), q_Thd.dtype
    value_dim = v_Xhv.shape[-1]
    channels = -(-max(q_Thd.shape[-1], value_dim) // FLASH_CHANNELS) * FLASH_CHANNELS
    o_Thx = varlen_attn(
        _widened(q_Thd, channels),
        _widened(k_Xhd, channels),
        _widened(v_Xhv, channels),
        pack.query_ends,
        pack.key_ends,
        max(pack.lengths),
        max(pack.key_lengths),
        scale=scale,
        window_size=(-1, 0),
    )
    return o_Thx[..., :value_dim]


def _widened(x: Tensor, channels: int) -> Tensor:
    missing = channels - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x


def experts(
    x_RH: Tensor,
    ids_Rk: Tensor,
    weights_Rk: Tensor,
    gate_up_e2FH: Tensor,
    down_eHF: Tensor,
    first_expert: int,
    width_slice: tuple[int, int],
    limit: float | None,
    shared: SharedExpert | None = None,
    residual_RH: Tensor | None = None,
) -> Tensor:
    """As the twin; which kernels run depends on the number of rows alone."""
    run = experts_grouped if x_RH.shape[0] >= MANY_ROWS else experts_of_few_rows
    weights = (gate_up_e2FH, down_eHF, first_expert, width_slice, limit)
    return run(x_RH, ids_Rk, weights_Rk, *weights, shared, residual_RH)
