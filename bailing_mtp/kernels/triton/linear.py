"""Projections of a handful of rows, bound by the weight's bytes, where a matrix product leaves bandwidth unused.

Shape legend: R rows, H inputs, N outputs; n outputs and c inputs of a tile.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

MOST_ROWS = 4
"""More rows go to the library's matrix product."""
MOST_OUTPUTS = 4096
"""So do several rows of more outputs, which are enough for its tiles to use the bandwidth."""
N_TILE = 2


@triton.jit
def _linear(
    out,
    x,
    weight,
    N,
    x_stride,
    R: tl.constexpr,
    H: tl.constexpr,
    N_TILE: tl.constexpr,
    C_TILE: tl.constexpr,
):
    ids_n = tl.program_id(0) * N_TILE + tl.arange(0, N_TILE)
    ids_c = tl.arange(0, C_TILE)
    rows_nc = weight + ids_n.to(tl.int64)[:, None] * H + ids_c[None, :]
    sums = ()
    for _ in tl.static_range(R):
        sums = sums + (tl.zeros([N_TILE], tl.float32),)
    # Unrolled, so that all of the weight's loads are in flight together.
    for c in tl.static_range(0, H, C_TILE):
        in_c = c + ids_c < H
        weight_nc = tl.load(rows_nc + c, mask=(ids_n < N)[:, None] & in_c[None, :], other=0.0).to(tl.float32)
        longer = ()
        for row in tl.static_range(R):
            x_c = tl.load(x + row * x_stride + c + ids_c, mask=in_c, other=0.0).to(tl.float32)
            longer = longer + (sums[row] + tl.sum(weight_nc * x_c[None, :], axis=1),)
        sums = longer
    for row in tl.static_range(R):
        tl.store(out + row * N + ids_n, sums[row].to(out.dtype.element_ty), mask=ids_n < N)


def products(x_RH: Tensor, weight_NH: Tensor, dtype: torch.dtype) -> Tensor:
    """x @ weight^T for 1 .. MOST_ROWS rows, summed in fp32; [R, N] in `dtype`."""
    (R, H), N = x_RH.shape, weight_NH.shape[0]
    assert 0 < R <= MOST_ROWS and x_RH.stride(1) == 1 and weight_NH.is_contiguous()
    out_RN = torch.empty(R, N, dtype=dtype, device=x_RH.device)
    c_tile = min(2048, triton.next_power_of_2(H))
    _linear[(triton.cdiv(N, N_TILE),)](
        out_RN, x_RH, weight_NH, N, x_RH.stride(0), R=R, H=H, N_TILE=N_TILE, C_TILE=c_tile, num_warps=2
    )
    return out_RN


def linear(x_RH: Tensor, weight_NH: Tensor) -> Tensor:
    """As kernels.reference.linear.linear; many rows go to the library."""
    R, N = x_RH.shape[0], weight_NH.shape[0]
    if not 0 < R <= MOST_ROWS or (R > 1 and N > MOST_OUTPUTS):
        return F.linear(x_RH, weight_NH)
    return products(x_RH, weight_NH, x_RH.dtype)
