"""Routed experts of a handful of rows: two launches of matrix-vector products, bound by the experts' bytes.

Shape legend: as kernels.reference.experts; n outputs and c summed channels of a tile.

Source: Bailing V3 spec section 2.3.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bailing_mtp.kernels.triton.swiglu import act


@triton.jit
def _gate_up(
    act_Af,
    x,
    ids,
    route_weights,
    gate_up,
    first_expert,
    start,
    f,
    limit,
    k: tl.constexpr,
    H: tl.constexpr,
    F: tl.constexpr,
    n_local: tl.constexpr,
    N_TILE: tl.constexpr,
    C_TILE: tl.constexpr,
    LIMITED: tl.constexpr,
):
    a = tl.program_id(0)
    ids_n = tl.program_id(1) * N_TILE + tl.arange(0, N_TILE)
    in_n = ids_n < f
    expert = tl.load(ids + a) - first_expert
    if (expert >= 0) & (expert < n_local):
        row = (a // k).to(tl.int64)
        rows_n1 = (gate_up + expert.to(tl.int64) * (2 * F * H) + (start + ids_n).to(tl.int64) * H)[:, None]
        gate_n = tl.zeros([N_TILE], tl.float32)
        up_n = tl.zeros([N_TILE], tl.float32)
        for c in tl.static_range(0, H, C_TILE):
            ids_c = c + tl.arange(0, C_TILE)
            mask_nc = in_n[:, None] & (ids_c < H)[None, :]
            x_c = tl.load(x + row * H + ids_c, mask=ids_c < H, other=0.0).to(tl.float32)
            gate_nc = tl.load(rows_n1 + ids_c[None, :], mask=mask_nc, other=0.0)
            up_nc = tl.load(rows_n1 + F * H + ids_c[None, :], mask=mask_nc, other=0.0)
            gate_n += tl.sum(gate_nc.to(tl.float32) * x_c[None, :], axis=1)
            up_n += tl.sum(up_nc.to(tl.float32) * x_c[None, :], axis=1)
        act_n = act(gate_n, up_n, limit, LIMITED) * tl.load(route_weights + a)
        tl.store(act_Af + a.to(tl.int64) * f + ids_n, act_n.to(act_Af.dtype.element_ty), mask=in_n)


@triton.jit
def _down(
    out,
    act_Af,
    ids,
    down,
    first_expert,
    start,
    f,
    k: tl.constexpr,
    H: tl.constexpr,
    F: tl.constexpr,
    n_local: tl.constexpr,
    N_TILE: tl.constexpr,
    C_TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    ids_n = tl.program_id(1) * N_TILE + tl.arange(0, N_TILE)
    ids_c = tl.arange(0, C_TILE)
    mask_nc = (ids_n < H)[:, None] & (ids_c < f)[None, :]
    places_nc = start + ids_n[:, None] * F + ids_c[None, :]
    y_n = tl.zeros([N_TILE], tl.float32)
    # No branch on whose expert it is, so that the loads of all k are in flight together.
    for j in tl.static_range(k):
        expert = tl.load(ids + row * k + j) - first_expert
        local = (expert >= 0) & (expert < n_local)
        expert = tl.where(local, expert, 0).to(tl.int64)
        act_c = tl.load(act_Af + (row * k + j) * f + ids_c, mask=local & (ids_c < f), other=0.0)
        down_nc = tl.load(down + expert * (H * F) + places_nc, mask=local & mask_nc, other=0.0)
        y_n += tl.sum(down_nc.to(tl.float32) * act_c.to(tl.float32)[None, :], axis=1)
    tl.store(out + row * H + ids_n, y_n.to(out.dtype.element_ty), mask=ids_n < H)


def _options(assignments: int, H: int) -> tuple[dict[str, int], dict[str, int]]:
    """Tiles and warps of _gate_up and of _down: smaller ones while there are programs to spare."""
    halves = 2 if assignments <= 24 else 1
    gate_up = {"N_TILE": 16 // halves, "C_TILE": min(512, triton.next_power_of_2(H)), "num_warps": 4}
    return gate_up, {"N_TILE": 8 // halves, "num_warps": 4}


def experts_of_few_rows(
    x_RH: Tensor,
    ids_Rk: Tensor,
    weights_Rk: Tensor,
    gate_up_e2FH: Tensor,
    down_eHF: Tensor,
    first_expert: int,
    width_slice: tuple[int, int],
    limit: float | None,
) -> Tensor:
    """As kernels.reference.experts.experts; each assignment reads its expert for itself."""
    (R, k), (n_local, H, F), (start, stop) = ids_Rk.shape, down_eHF.shape, width_slice
    f, device = stop - start, x_RH.device
    act_Af = torch.empty(R * k, f, dtype=x_RH.dtype, device=device)
    out_RH = torch.empty(R, H, dtype=x_RH.dtype, device=device)
    for_gate_up, for_down = _options(R * k, H)
    _gate_up[(R * k, triton.cdiv(f, for_gate_up["N_TILE"]))](
        act_Af,
        x_RH,
        ids_Rk,
        weights_Rk,
        gate_up_e2FH,
        first_expert,
        start,
        f,
        0.0 if limit is None else limit,
        k=k,
        H=H,
        F=F,
        n_local=n_local,
        LIMITED=limit is not None,
        **for_gate_up,
    )
    _down[(R, triton.cdiv(H, for_down["N_TILE"]))](
        out_RH,
        act_Af,
        ids_Rk,
        down_eHF,
        first_expert,
        start,
        f,
        k=k,
        H=H,
        F=F,
        n_local=n_local,
        C_TILE=triton.next_power_of_2(f),
        **for_down,
    )
    return out_RH
