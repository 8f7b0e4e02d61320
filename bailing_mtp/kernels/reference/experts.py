"""SwiGLU and the routed experts of this rank for decoding, in plain torch.

Shape legend: R rows, k experts per row, A = R * k assignments of a row to an expert, H hidden size,
F width of an expert, f width of the slice taken, e experts of this rank.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class SharedExpert(NamedTuple):
    """A SwiGLU that every row passes through: gate rows, then up rows. Widths are this rank's."""

    gate_up_2FH: Tensor
    down_HF: Tensor
    limit: float | None
    channels: tuple[int, int]
    """First and one past the last of its width that is computed, so that ranks with the same shard can share it."""

    def run(self, x_RH: Tensor, act: Callable[[Tensor, Tensor, float | None], Tensor]) -> Tensor:
        """Its result on the rows, [R, H]. act: swiglu, or another function like it."""
        (start, stop), width = self.channels, self.down_HF.shape[1]
        if start == stop:
            return torch.zeros_like(x_RH)
        if stop - start == width:
            gate_Rf, up_Rf = F.linear(x_RH, self.gate_up_2FH).chunk(2, dim=-1)
        else:
            gate_Rf = F.linear(x_RH, self.gate_up_2FH[start:stop])
            up_Rf = F.linear(x_RH, self.gate_up_2FH[width + start : width + stop])
        return F.linear(act(gate_Rf, up_Rf, self.limit), self.down_HF[:, start:stop])


def swiglu(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """silu(gate) * up; with a limit L, min(silu(gate), L) * clamp(up, -L, L)."""
    gate = F.silu(gate)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * up


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
    """Weighted sum of this rank's experts on each row, [R, H] in x's dtype, summed in fp32.

    This rank holds the experts first_expert, first_expert + 1, ...; of each it computes the channels
    width_slice = (start, stop) of its width, so that ranks with the same experts can share the work.
    Assignments to other experts add nothing; a row's choices are distinct. The shared expert's result and the
    residual join the same sum. On a GPU, in bf16, shapes do not depend on the routing and the host does not
    wait.
    """
    n_local, width = gate_up_e2FH.shape[0], down_eHF.shape[2]
    start, stop = width_slice
    gate_efH, up_efH = gate_up_e2FH[:, start:stop], gate_up_e2FH[:, width + start : width + stop]
    down_eHf = down_eHF[..., start:stop]
    local_A = ids_Rk.flatten() - first_expert
    local_A = torch.where((local_A >= 0) & (local_A < n_local), local_A, n_local)
    order_A = local_A.argsort(stable=True)
    row_A = order_A // ids_Rk.shape[1]
    counts_e = torch.zeros(n_local + 1, dtype=torch.int64, device=x_RH.device).scatter_add_(
        0, local_A, torch.ones_like(local_A)
    )[:n_local]
    run = _grouped if x_RH.is_cuda else _one_by_one
    y_AH = run(x_RH[row_A], weights_Rk.flatten()[order_A], counts_e, gate_efH, up_efH, down_eHf, limit)
    y_AH = y_AH.float().masked_fill_((local_A[order_A] == n_local).unsqueeze(1), 0)
    # Back to the order of the rows, so that a row's sum is in the order of its choices.
    y_RH = torch.empty_like(y_AH).index_copy_(0, order_A, y_AH).unflatten(0, ids_Rk.shape).sum(1)
    if shared is not None:
        y_RH = y_RH + shared.run(x_RH, swiglu)
    if residual_RH is not None:
        y_RH = y_RH + residual_RH
    return y_RH.to(x_RH.dtype)


def _grouped(
    x_AH: Tensor,
    weights_A: Tensor,
    counts_e: Tensor,
    gate_efH: Tensor,
    up_efH: Tensor,
    down_eHf: Tensor,
    limit: float | None,
) -> Tensor:
    """Rows sorted by expert, foreign ones last; their results are undefined."""
    ends_e = counts_e.cumsum(0).to(torch.int32)
    gate_Af = F.grouped_mm(x_AH, gate_efH.transpose(1, 2), offs=ends_e)
    up_Af = F.grouped_mm(x_AH, up_efH.transpose(1, 2), offs=ends_e)
    act_Af = (swiglu(gate_Af, up_Af, limit) * weights_A.unsqueeze(1)).to(x_AH.dtype)
    return F.grouped_mm(act_Af, down_eHf.transpose(1, 2), offs=ends_e)


def _one_by_one(
    x_AH: Tensor,
    weights_A: Tensor,
    counts_e: Tensor,
    gate_efH: Tensor,
    up_efH: Tensor,
    down_eHf: Tensor,
    limit: float | None,
) -> Tensor:
    """As _grouped, reading the counts on the host."""
    y_AH = torch.zeros_like(x_AH)
    begin = 0
    for expert, count in enumerate(counts_e.tolist()):
        rows = slice(begin, begin + count)
        if count:
            gate_Af, up_Af = F.linear(x_AH[rows], gate_efH[expert]), F.linear(x_AH[rows], up_efH[expert])
            act_Af = (swiglu(gate_Af, up_Af, limit) * weights_A[rows].unsqueeze(1)).to(x_AH.dtype)
            y_AH[rows] = F.linear(act_Af, down_eHf[expert])
        begin += count
    return y_AH
