"""Tokens to the ranks that hold their experts, and the sums of those experts' outputs back.

A token goes once to each rank that holds any of its experts, with all of its choices, and that rank's experts come
back as one weighted sum: with k choices on few ranks a fraction of the bytes of one row per choice.

Shapes: T tokens of this rank, k experts per token, P ranks of the expert-parallel group, S rows sent, R rows received,
H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from bailing_mtp.model.placement import Placement, placement


@dataclass(frozen=True)
class Exchange:
    """The way of one layer's tokens, in both directions. Every rank of the group makes the same calls."""

    group: ProcessGroup
    kernels: ModuleType
    token_S: Tensor
    """Token of each row sent; rows are sorted by rank."""
    place_TP: Tensor
    """Row that each token sent to each rank; past the end where it sent none."""
    n_sent: list[int]
    """Rows to each rank."""
    n_received: list[int]
    """Rows from each rank."""
    n_choices: int
    """Of the rows received, choices of this rank's experts."""

    def there(self, x_TH: Tensor) -> Tensor:
        """Rows of this rank's tokens [T, ...] -> rows received [R, ...]. Collective."""
        return self._moved(x_TH.index_select(0, self.token_S), self.n_sent, self.n_received)

    def back(self, y_RH: Tensor) -> Tensor:
        """Rows made of those received [R, H] -> sums over each token's ranks [T, H], added in fp32. Collective."""
        return self.kernels.sum_choices(self._moved(y_RH, self.n_received, self.n_sent), self.place_TP)

    def _moved(self, rows: Tensor, n_out: list[int], n_in: list[int]) -> Tensor:
        moved = rows.new_empty(sum(n_in), *rows.shape[1:])
        dist.all_to_all_single(moved, rows.contiguous(), n_in, n_out, group=self.group)
        return moved


class OpeningExchange:
    """An exchange whose sizes are still under way to the host: work that is queued meanwhile hides the wait."""

    def __init__(self, ids_Tk: Tensor, n_local_experts: int, group: ProcessGroup, kernels: ModuleType) -> None:
        """ids_Tk: the experts of this rank's tokens, which lie in blocks of `n_local_experts` by rank. Collective."""
        self._group, self._kernels, n_ranks = group, kernels, group.size()
        ranks_P = torch.arange(n_ranks, device=ids_Tk.device)
        choices_TP = ((ids_Tk // n_local_experts).unsqueeze(-1) == ranks_P).sum(1)
        goes_TP = choices_TP > 0
        self._where: Placement = placement(torch.where(goes_TP, ranks_P, n_ranks), n_ranks)
        sent_P2 = torch.stack((goes_TP.sum(0), choices_TP.sum(0)), 1)
        received_P2 = torch.empty_like(sent_P2)
        dist.all_to_all_single(received_P2, sent_P2, group=group)
        sizes_P4 = torch.cat((sent_P2, received_P2), 1)
        self._sizes_P4, self._arrived = sizes_P4, None
        if sizes_P4.is_cuda:
            # Into pinned memory: any other copy would wait here for all queued work.
            self._sizes_P4 = torch.empty(sizes_P4.shape, dtype=sizes_P4.dtype, pin_memory=True)
            self._sizes_P4.copy_(sizes_P4, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> Exchange:
        """The host's one wait for the device in a layer: buffers have the sizes that routers chose."""
        if self._arrived is not None:
            self._arrived.synchronize()
        n_sent, _, n_received, n_choices = self._sizes_P4.t().tolist()
        where = self._where.first(sum(n_sent))
        return Exchange(
            self._group, self._kernels, where.token_A, where.place_Tk, n_sent, n_received, sum(n_choices)
        )


def send_tokens(
    exchange: Exchange, ids_Tk: Tensor, n_local_experts: int, x_TH: Tensor, weights_Tk: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the rows received: ids [R, k] within this rank's experts, `n_local_experts` for those of other ranks; inputs
    [R, H]; fp32 weights [R, k]. Collective, and once more in the backward."""
    ids_Rk, x_RH, weights_Rk = _There.apply(exchange, ids_Tk, x_TH, weights_Tk)
    ids_Rk = ids_Rk - exchange.group.rank() * n_local_experts
    is_here_Rk = (ids_Rk >= 0) & (ids_Rk < n_local_experts)
    return torch.where(is_here_Rk, ids_Rk, n_local_experts), x_RH, weights_Rk


def return_sums(exchange: Exchange, y_RH: Tensor) -> Tensor:
    """[R, H] -> [T, H], summed over each token's ranks. Collective, and once more in the backward."""
    return _Back.apply(exchange, y_RH)


class _There(Function):
    """A token that went to several ranks gets the sum of their gradients: the way back."""

    @staticmethod
    def forward(
        ctx: Any, exchange: Exchange, ids_Tk: Tensor, x_TH: Tensor, weights_Tk: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.exchange = exchange
        # Ids and weights in one exchange, as bits.
        choices_T2k = torch.cat((ids_Tk.int(), weights_Tk.view(torch.int32)), 1)
        ids_Rk, weights_Rk = exchange.there(choices_T2k).tensor_split(2, 1)
        ctx.mark_non_differentiable(ids_Rk)
        return ids_Rk, exchange.there(x_TH), weights_Rk.contiguous().view(torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, x_grad_RH: Tensor, weights_grad_Rk: Tensor) -> tuple[Tensor | None, ...]:
        back = ctx.exchange.back
        return None, None, back(x_grad_RH), back(weights_grad_Rk)


class _Back(Function):
    """The gradient of a sum is that of each of its terms: the way there."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, y_RH: Tensor) -> Tensor:
        ctx.exchange = exchange
        return exchange.back(y_RH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.exchange.there(grad_TH)
