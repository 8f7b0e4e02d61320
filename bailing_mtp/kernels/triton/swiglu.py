"""SwiGLU in one pass.

Shape legend: R rows, F width.

Source: Bailing V3 spec section 2.3.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024


@triton.jit
def act(gate, up, limit, LIMITED: tl.constexpr):
    """silu(gate) * up in fp32; with a limit L, min(silu(gate), L) * clamp(up, -L, L)."""
    gate = gate * tl.sigmoid(gate)
    if LIMITED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    return gate * up


@triton.jit
def _swiglu(
    out, gate, up, gate_stride, up_stride, limit, F: tl.constexpr, TILE: tl.constexpr, LIMITED: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    gate_F = tl.load(gate + row * gate_stride + ids, mask=ids < F, other=0.0).to(tl.float32)
    up_F = tl.load(up + row * up_stride + ids, mask=ids < F, other=0.0).to(tl.float32)
    act_F = act(gate_F, up_F, limit, LIMITED)
    tl.store(out + row * F + ids, act_F.to(out.dtype.element_ty), mask=ids < F)


def swiglu(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """As kernels.reference.experts.swiglu, in fp32 between its input and its result; [R, F]."""
    (R, F), tile = gate.shape, min(TILE, triton.next_power_of_2(gate.shape[1]))
    assert gate.shape == up.shape and gate.stride(1) == 1 and up.stride(1) == 1
    out_RF = torch.empty(R, F, dtype=gate.dtype, device=gate.device)
    if R:
        _swiglu[(R, triton.cdiv(F, tile))](
            out_RF,
            gate,
            up,
            gate.stride(0),
            up.stride(0),
            0.0 if limit is None else limit,
            F=F,
            TILE=tile,
            LIMITED=limit is not None,
            num_warps=4 if tile >= 1024 else 2,
        )
    return out_RF
