"""Several small projections of the same rows in one launch.

Shape legend: as kernels.reference.linear; N outputs of all weights together; m rows, u outputs and c inputs
of a tile. A tile of outputs belongs to one weight.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from bailing_mtp.kernels.triton.linear import MOST_ROWS

MOST_WEIGHTS = 3
MOST_MATRIX_ROWS = 256
"""More rows fill the GPU one weight at a time: the library's matrix product."""


@triton.jit
def _outputs(weight_0, weight_1, weight_2, N_0: tl.constexpr, N_1: tl.constexpr, N_2: tl.constexpr,
             U_TILE: tl.constexpr):  # fmt: skip
    """The weight of this tile, its outputs in that weight, which of them are real, the weight's first column."""
    TILES_0: tl.constexpr = (N_0 + U_TILE - 1) // U_TILE
    TILES_1: tl.constexpr = TILES_0 + (N_1 + U_TILE - 1) // U_TILE
    tile = tl.program_id(0)
    second, third = tile >= TILES_0, tile >= TILES_1
    weight = tl.where(third, weight_2, tl.where(second, weight_1, weight_0))
    first_tile = tl.where(third, TILES_1, tl.where(second, TILES_0, 0))
    ids_u = (tile - first_tile) * U_TILE + tl.arange(0, U_TILE)
    in_u = ids_u < tl.where(third, N_2, tl.where(second, N_1, N_0))
    return weight, ids_u, in_u, tl.where(third, N_0 + N_1, tl.where(second, N_0, 0))


@triton.jit
def _few(
    out, x, weight_0, weight_1, weight_2, x_stride,
    R: tl.constexpr, H: tl.constexpr, N_0: tl.constexpr, N_1: tl.constexpr, N_2: tl.constexpr,
    U_TILE: tl.constexpr, C_TILE: tl.constexpr,
):  # fmt: skip
    weight, ids_u, in_u, column = _outputs(weight_0, weight_1, weight_2, N_0, N_1, N_2, U_TILE)
    ids_c = tl.arange(0, C_TILE)
    sums = ()
    for _ in tl.static_range(R):
        sums = sums + (tl.zeros([U_TILE], tl.float32),)
    # Unrolled, so that all of the weight's loads are in flight together.
    for c in tl.static_range(0, H, C_TILE):
        in_c = c + ids_c < H
        places_uc = weight + ids_u.to(tl.int64)[:, None] * H + c + ids_c[None, :]
        weight_uc = tl.load(places_uc, mask=in_u[:, None] & in_c[None, :], other=0.0).to(tl.float32)
        longer = ()
        for row in tl.static_range(R):
            x_c = tl.load(x + row * x_stride + c + ids_c, mask=in_c, other=0.0).to(tl.float32)
            longer = longer + (sums[row] + tl.sum(weight_uc * x_c[None, :], axis=1),)
        sums = longer
    for row in tl.static_range(R):
        place_u = out + row * (N_0 + N_1 + N_2) + column + ids_u
        tl.store(place_u, sums[row].to(out.dtype.element_ty), mask=in_u)


@triton.jit
def _many(
    out, x, weight_0, weight_1, weight_2, x_stride, R,
    H: tl.constexpr, N_0: tl.constexpr, N_1: tl.constexpr, N_2: tl.constexpr,
    M_TILE: tl.constexpr, U_TILE: tl.constexpr, C_TILE: tl.constexpr,
):  # fmt: skip
    weight, ids_u, in_u, column = _outputs(weight_0, weight_1, weight_2, N_0, N_1, N_2, U_TILE)
    ids_m = tl.program_id(1) * M_TILE + tl.arange(0, M_TILE)
    ids_c = tl.arange(0, C_TILE)
    in_m = ids_m < R
    rows_mc = x + ids_m.to(tl.int64)[:, None] * x_stride + ids_c[None, :]
    columns_cu = weight + ids_u[None, :] * H + ids_c[:, None]
    acc_mu = tl.zeros([M_TILE, U_TILE], tl.float32)
    for c in range(0, H, C_TILE):
        in_c = c + ids_c < H
        x_mc = tl.load(rows_mc + c, mask=in_m[:, None] & in_c[None, :], other=0.0)
        weight_cu = tl.load(columns_cu + c, mask=in_c[:, None] & in_u[None, :], other=0.0)
        acc_mu = tl.dot(x_mc, weight_cu, acc_mu, input_precision="ieee")
    target_mu = out + ids_m.to(tl.int64)[:, None] * (N_0 + N_1 + N_2) + (column + ids_u)[None, :]
    tl.store(target_mu, acc_mu.to(out.dtype.element_ty), mask=in_m[:, None] & in_u[None, :])


def linears(x_RH: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """As kernels.reference.linear.linears, for up to MOST_WEIGHTS weights."""
    (R, H), sizes = x_RH.shape, [weight_NH.shape[0] for weight_NH in weights]
    assert 0 < len(weights) <= MOST_WEIGHTS
    if not 0 < R <= MOST_MATRIX_ROWS:
        return tuple(F.linear(x_RH, weight_NH) for weight_NH in weights)
    assert x_RH.stride(1) == 1 and all(w.is_contiguous() and w.dtype == x_RH.dtype for w in weights)
    out_RN = torch.empty(R, sum(sizes), dtype=x_RH.dtype, device=x_RH.device)
    pointers = (*weights, *weights[:1] * (MOST_WEIGHTS - len(weights)))
    numbers = {f"N_{i}": sizes[i] if i < len(sizes) else 0 for i in range(MOST_WEIGHTS)}
    u_tile = 2 if R <= MOST_ROWS else 16
    tiles = sum(triton.cdiv(size, u_tile) for size in sizes)
    if R <= MOST_ROWS:
        c_tile = min(2048, triton.next_power_of_2(H))
        _few[(tiles,)](
            out_RN, x_RH, *pointers, x_RH.stride(0), R=R, H=H, **numbers, U_TILE=u_tile, C_TILE=c_tile, num_warps=2
        )
    else:
        m_tile, wide = 16 if R <= 128 else 64, x_RH.element_size() == 4
        _many[(tiles, triton.cdiv(R, m_tile))](
            out_RN, x_RH, *pointers, x_RH.stride(0), R, H=H, **numbers, M_TILE=m_tile, U_TILE=u_tile,
            C_TILE=64 if wide else 512 if m_tile == 16 else 128, num_warps=4, num_stages=2 if wide else 3,
        )  # fmt: skip
    return out_RN.split(sizes, dim=1)
