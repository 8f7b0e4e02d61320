"""Routed experts as grouped GEMMs over tokens sorted on the device.

A rank that holds all experts exchanges nothing, and its host never waits. Where experts are split, `exchange` brings
the tokens here, and the host waits once a layer for their number.

Shapes: T tokens (of this rank's sequence shard, or received), k experts per token, A assignments to experts held here
(T * k where all are), E experts held here, H hidden size, F width of an expert.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from bailing_mtp.model.exchange import OpeningExchange, return_sums, send_tokens
from bailing_mtp.model.placement import Placement, placement


class GroupedMoeLayer(MoELayer):
    """megatron-core's MoE layer with its own router and experts, without its dispatcher.

    keeps_inputs: False computes the experts' sorted inputs and activations again in the backward, from the tokens
    alone. Received tokens are kept for that: a row for each of a token's ranks, where the sorted inputs are a row for
    each of its experts; another exchange in the backward would save less than it costs.
    """

    def __init__(self, *args: Any, kernels: ModuleType, keeps_inputs: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kernels, self.keeps_inputs = kernels, keeps_inputs

    def forward(
        self,
        hidden_states: Tensor,
        intermediate_tensors: Any = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """[s, 1, H] -> ([s, 1, H], no bias); `padding_mask` [1, s] is True on tokens that routers do not count."""
        ids_Tk, weights_Tk = self.router.chosen(hidden_states, padding_mask, self.kernels)
        x_TH, n_local = hidden_states.flatten(0, 1), self.num_local_experts
        if n_local == self.config.num_moe_experts:
            shared = self.shared_experts_compute(hidden_states)
            out_TH = self._routed(ids_Tk, x_TH, weights_Tk, ids_Tk.numel())
        else:
            opening = OpeningExchange(ids_Tk, n_local, self.ep_group, self.kernels)
            shared = self.shared_experts_compute(hidden_states)
            exchange = opening.wait()
            received = send_tokens(exchange, ids_Tk, n_local, x_TH, weights_Tk)
            out_TH = return_sums(exchange, self._routed(*received, exchange.n_choices))
        out = out_TH.view(hidden_states.shape)
        return (out if shared is None else out + shared), None

    def _routed(self, ids_Tk: Tensor, x_TH: Tensor, weights_Tk: Tensor, n_choices: int) -> Tensor:
        experts = self.experts
        return _Experts.apply(
            self.kernels,
            experts.limit,
            self.keeps_inputs,
            n_choices,
            ids_Tk,
            x_TH,
            weights_Tk,
            experts.gate_up,
            experts.down,
        )


class _Experts(Function):
    """sum over a token's experts held here of weight * down(swiglu(gate_up x)), as grouped GEMMs both ways.

    ids_Tk: E for experts of other ranks, `n_choices` others. A row's gradient goes back to its token by the same sum
    over places that joins the experts' outputs, so nothing is added atomically and a repeated run gives the same bits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kernels: ModuleType,
        limit: float | None,
        keeps_inputs: bool,
        n_choices: int,
        ids_Tk: Tensor,
        x_TH: Tensor,
        weights_Tk: Tensor,
        gate_up_E2FH: Tensor,
        down_EHF: Tensor,
    ) -> Tensor:
        ctx.kernels, ctx.limit, ctx.n_choices, ctx.weights_dtype = kernels, limit, n_choices, weights_Tk.dtype
        if not n_choices:
            ctx.save_for_backward(x_TH, weights_Tk, gate_up_E2FH, down_EHF)
            return torch.zeros_like(x_TH)
        where = placement(ids_Tk, gate_up_E2FH.shape[0]).first(n_choices)
        x_AH = x_TH.index_select(0, where.token_A)
        weights_A = weights_Tk.flatten()[where.order_A]
        hidden_A2F = F.grouped_mm(x_AH, gate_up_E2FH.transpose(1, 2), offs=where.ends_E)
        act_AF = kernels.weighted_swiglu(hidden_A2F, weights_A, limit)
        y_AH = F.grouped_mm(act_AF, down_EHF.transpose(1, 2), offs=where.ends_E)
        kept = (x_AH, act_AF) if keeps_inputs else (x_TH, None)
        ctx.save_for_backward(*kept, hidden_A2F, weights_A, *where, gate_up_E2FH, down_EHF)
        return kernels.sum_choices(y_AH, where.place_Tk)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.n_choices:
            return None, None, None, None, None, *map(torch.zeros_like, ctx.saved_tensors)
        x, act_AF, hidden_A2F, weights_A, *rest = ctx.saved_tensors
        where, (gate_up_E2FH, down_EHF) = Placement(*rest[:4]), rest[4:]
        x_AH = x if act_AF is not None else x.index_select(0, where.token_A)
        if act_AF is None:
            act_AF = ctx.kernels.weighted_swiglu(hidden_A2F, weights_A, ctx.limit)
        grad_AH = grad_TH.index_select(0, where.token_A)
        down_grad = F.grouped_mm(grad_AH.t(), act_AF, offs=where.ends_E)
        act_grad_AF = F.grouped_mm(grad_AH, down_EHF, offs=where.ends_E)
        del grad_AH, act_AF
        hidden_grad_A2F, weights_grad_A = ctx.kernels.weighted_swiglu_grad(
            act_grad_AF, hidden_A2F, weights_A, ctx.limit
        )
        gate_up_grad = F.grouped_mm(hidden_grad_A2F.t(), x_AH, offs=where.ends_E)
        x_grad_AH = F.grouped_mm(hidden_grad_A2F, gate_up_E2FH, offs=where.ends_E)
        x_grad_TH = ctx.kernels.sum_choices(x_grad_AH, where.place_Tk)
        # Of other ranks' experts no gradient comes from here.
        weights_grad = weights_grad_A.new_zeros(where.place_Tk.numel(), dtype=ctx.weights_dtype)
        weights_grad[where.order_A] = weights_grad_A.to(ctx.weights_dtype)
        weights_grad_Tk = weights_grad.view(where.place_Tk.shape)
        return None, None, None, None, None, x_grad_TH, weights_grad_Tk, gate_up_grad, down_grad
