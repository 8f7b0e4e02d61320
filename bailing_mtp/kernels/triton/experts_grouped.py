"""Routed experts of many rows: assignments sorted by expert, then grouped GEMMs over the stacked weights in place.

Nothing waits for the device: the bounds of the groups stay on it, and shapes do not depend on the routing.

Shape legend: as kernels.reference.experts; A assignments in the order of their experts, n outputs of a tile.

Source: Bailing V3 spec section 2.3.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from bailing_mtp.kernels.reference.experts import SharedExpert
from bailing_mtp.kernels.triton.swiglu import act, swiglu

TILE = 1024


@triton.jit
def _weighted_swiglu(
    out,
    gate,
    up,
    route_weights,
    order_A,
    gate_stride,
    up_stride,
    limit,
    f: tl.constexpr,
    TILE: tl.constexpr,
    LIMITED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    gate_f = tl.load(gate + row * gate_stride + ids, mask=ids < f, other=0.0).to(tl.float32)
    up_f = tl.load(up + row * up_stride + ids, mask=ids < f, other=0.0).to(tl.float32)
    weight = tl.load(route_weights + tl.load(order_A + row))
    act_f = act(gate_f, up_f, limit, LIMITED) * weight
    tl.store(out + row * f + ids, act_f.to(out.dtype.element_ty), mask=ids < f)


@triton.jit
def _combine(
    out,
    y_AH,
    ids,
    place_A,
    first_expert,
    k: tl.constexpr,
    H: tl.constexpr,
    n_local: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    ids_n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    sum_n = tl.zeros([TILE], tl.float32)
    for j in tl.static_range(k):
        expert = tl.load(ids + row * k + j) - first_expert
        local = (expert >= 0) & (expert < n_local)
        place = tl.load(place_A + row * k + j)
        sum_n += tl.load(y_AH + place * H + ids_n, mask=local & (ids_n < H), other=0.0).to(tl.float32)
    tl.store(out + row * H + ids_n, sum_n.to(out.dtype.element_ty), mask=ids_n < H)


def experts_grouped(
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
    """As kernels.reference.experts.experts; on a GPU in bf16, and H and the slice in multiples of 8."""
    (R, k), (n_local, H, width), (start, stop) = ids_Rk.shape, down_eHF.shape, width_slice
    A, f, device = R * k, stop - start, x_RH.device
    assert all(x.is_contiguous() for x in (ids_Rk, weights_Rk, gate_up_e2FH, down_eHF))
    local_A = ids_Rk.flatten() - first_expert
    # Assignments to other ranks' experts come last, past the end of the last group. 16 bits sort faster.
    local_A = torch.where((local_A >= 0) & (local_A < n_local), local_A, n_local).to(torch.int16)
    sorted_A, order_A = local_A.sort(stable=True)
    each_e = torch.arange(n_local, dtype=torch.int16, device=device)
    ends_e = torch.searchsorted(sorted_A, each_e, right=True, out_int32=True)
    place_A = torch.empty_like(order_A)
    place_A[order_A] = torch.arange(A, device=device)

    x_AH = x_RH[order_A // k]
    if f == width:
        gate_Af, up_Af = F.grouped_mm(x_AH, gate_up_e2FH.transpose(1, 2), offs=ends_e).split(f, dim=1)
    else:
        parts = gate_up_e2FH[:, start:stop], gate_up_e2FH[:, width + start : width + stop]
        gate_Af, up_Af = (F.grouped_mm(x_AH, part.transpose(1, 2), offs=ends_e) for part in parts)
    act_Af = torch.empty(A, f, dtype=x_RH.dtype, device=device)
    tile = min(TILE, triton.next_power_of_2(f))
    _weighted_swiglu[(A, triton.cdiv(f, tile))](
        act_Af,
        gate_Af,
        up_Af,
        weights_Rk,
        order_A,
        gate_Af.stride(0),
        up_Af.stride(0),
        0.0 if limit is None else limit,
        f=f,
        TILE=tile,
        LIMITED=limit is not None,
        num_warps=4 if tile >= 1024 else 2,
    )
    y_AH = F.grouped_mm(act_Af, down_eHF[..., start:stop].transpose(1, 2), offs=ends_e)
    out_RH = torch.empty_like(x_RH)
    tile = min(TILE, triton.next_power_of_2(H))
    _combine[(R, triton.cdiv(H, tile))](
        out_RH, y_AH, ids_Rk, place_A, first_expert, k=k, H=H, n_local=n_local, TILE=tile, num_warps=4
    )
    if shared is not None:
        out_RH += shared.run(x_RH, swiglu)
    return out_RH if residual_RH is None else out_RH.add_(residual_RH)
