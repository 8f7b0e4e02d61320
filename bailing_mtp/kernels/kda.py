"""Kimi delta attention on the GPU, through fla's Triton kernels.  Importing this module takes seconds (fla).

Names, signatures and shape legend are those of the torch twin, `bailing_mtp.kernels.reference.kda`.
"""

from functools import lru_cache

import torch
from fla.modules.causal_conv1d import causal_conv1d
from fla.ops.kda import chunk_kda as fla_chunk_kda
from fla.ops.kda.gate import fused_kda_gate
from torch import Tensor

from bailing_mtp.kernels.reference import kda as reference


def short_conv(
    x_TC: Tensor,
    weight_CW: Tensor,
    cu_seqlens: Tensor,
    history_NWC: Tensor | None = None,
    return_history: bool = False,
    lengths: tuple[int, ...] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Depthwise causal convolution per document, then SiLU; as the twin.

    Accumulated in fp32, rounded once to x's dtype.  Without `lengths` the chunk table is built from
    `cu_seqlens` with a device sync.
    """
    if x_TC.shape[0] == 0:
        return reference.short_conv(x_TC, weight_CW, cu_seqlens, history_NWC, return_history)
    taps = weight_CW.shape[1]
    state_NCW = None
    if history_NWC is not None:
        # fla's state has W columns, of which a convolution of W taps never reads the first.
        state_NCW = torch.nn.functional.pad(history_NWC.transpose(1, 2), (1, 0)).to(x_TC.dtype)
    y_1TC, _ = causal_conv1d(
        x_TC.unsqueeze(0),
        weight_CW,
        initial_state=state_NCW,
        activation="silu",
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=None if lengths is None else _host_cu_seqlens(lengths, cu_seqlens.dtype),
    )
    if not return_history:
        return y_1TC[0]
    return y_1TC[0], reference.last_inputs(x_TC, taps - 1, cu_seqlens, history_NWC)


def kda_gate(f_Thd: Tensor, A_log_h: Tensor, dt_bias_hd: Tensor, lower_bound: float | None) -> Tensor:
    """Log decay [T, h, d] in fp32; as the twin, without its intermediates."""
    if f_Thd.shape[0] == 0:
        return reference.kda_gate(f_Thd, A_log_h, dt_bias_hd, lower_bound)
    # Flat, because fla returns the gradient of the bias flat.
    return fused_kda_gate(f_Thd, A_log_h, dt_bias_hd.reshape(-1), lower_bound)


def chunk_kda(
    q_Thd: Tensor,
    k_Thd: Tensor,
    v_Thv: Tensor,
    log_decay_Thd: Tensor,
    beta_Th: Tensor,
    cu_seqlens: Tensor,
    lengths: tuple[int, ...],
    initial_state_Nhkv: Tensor | None = None,
    output_final_state: bool = False,
    bounded_decay: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule over the documents of a pack; as the twin.

    q, k and v are rounded to their common dtype between kernels, decays and states stay fp32.
    `bounded_decay` promises log decays in [-5, 0] and picks the tensor-core form of the products inside a
    chunk, which overflows outside that range.
    """
    if q_Thd.shape[0] == 0:
        return reference.chunk_kda(
            q_Thd,
            k_Thd,
            v_Thv,
            log_decay_Thd,
            beta_Th,
            cu_seqlens,
            lengths,
            initial_state_Nhkv,
            output_final_state,
        )
    assert sum(lengths) == q_Thd.shape[0], f"lengths sum to {sum(lengths)}, T is {q_Thd.shape[0]}"
    o_1Thv, final_Nhkv = fla_chunk_kda(
        q_Thd.unsqueeze(0),
        k_Thd.unsqueeze(0),
        v_Thv.unsqueeze(0),
        log_decay_Thd.unsqueeze(0),
        beta_Th.unsqueeze(0),
        initial_state=None if initial_state_Nhkv is None else initial_state_Nhkv.float(),
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=True,
        safe_gate=bounded_decay,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=_host_cu_seqlens(lengths, cu_seqlens.dtype),
    )
    return o_1Thv[0], final_Nhkv


def gated_chunk_kda(
    q_Thd: Tensor,
    k_Thd: Tensor,
    v_Thv: Tensor,
    f_Thd: Tensor,
    beta_Th: Tensor,
    A_log_h: Tensor,
    dt_bias_hd: Tensor,
    lower_bound: float | None,
    cu_seqlens: Tensor,
    lengths: tuple[int, ...],
) -> Tensor:
    """As the twin. Bounded decays in [-5, 0] are made inside fla's kernels: never held in fp32 for a whole pack."""
    if q_Thd.shape[0] == 0 or lower_bound is None or lower_bound < -5:
        log_decay_Thd = kda_gate(f_Thd, A_log_h, dt_bias_hd, lower_bound)
        return chunk_kda(q_Thd, k_Thd, v_Thv, log_decay_Thd, beta_Th.float().sigmoid(), cu_seqlens, lengths)[0]
    assert sum(lengths) == q_Thd.shape[0], f"lengths sum to {sum(lengths)}, T is {q_Thd.shape[0]}"
    o_1Thv, _ = fla_chunk_kda(
        q_Thd.unsqueeze(0),
        k_Thd.unsqueeze(0),
        v_Thv.unsqueeze(0),
        f_Thd.unsqueeze(0),
        beta_Th.float().sigmoid().unsqueeze(0),
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        A_log=A_log_h,
        # Flat, because fla returns the gradient of the bias flat.
        dt_bias=dt_bias_hd.reshape(-1),
        safe_gate=True,
        lower_bound=lower_bound,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=_host_cu_seqlens(lengths, cu_seqlens.dtype),
    )
    return o_1Thv[0]


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # a cached inference tensor could not be used in a later backward
def _host_cu_seqlens(lengths: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    # The same object for the same lengths: fla keys its cache of chunk tables by identity.
    return torch.tensor([0, *lengths], dtype=dtype).cumsum(0, dtype=dtype)
