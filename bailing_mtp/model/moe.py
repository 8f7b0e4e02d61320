"""Routed experts of a rank that holds all of them: no exchange of tokens, and the host never waits.

Shapes: T tokens of this rank (its sequence shard), k experts per token, A = T * k assignments, E experts, H hidden
size, F width of an expert.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class LocalMoeLayer(MoELayer):
    """megatron-core's MoE layer; where expert parallel is 1, tokens are sorted, fed to grouped GEMMs and summed
    here, with every count and offset on the device. With more ranks its dispatcher moves the tokens.

    keeps_inputs: False computes the experts' sorted inputs and activations again in the backward.
    """

    def __init__(self, *args: Any, kernels: ModuleType, keeps_inputs: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kernels, self.keeps_inputs = kernels, keeps_inputs
        self.holds_every_expert = self.num_local_experts == self.config.num_moe_experts

    def forward(
        self,
        hidden_states: Tensor,
        intermediate_tensors: Any = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """[s, 1, H] -> ([s, 1, H], no bias); `padding_mask` [1, s] is True on tokens that routers do not count."""
        if not self.holds_every_expert or not hidden_states.numel():
            return super().forward(hidden_states, intermediate_tensors, padding_mask)
        shared = self.shared_experts_compute(hidden_states)
        ids_Tk, weights_Tk = self.router.chosen(hidden_states, padding_mask, self.kernels)
        experts = self.experts
        out_TH = _Experts.apply(
            self.kernels,
            experts.limit,
            self.keeps_inputs,
            ids_Tk,
            hidden_states.flatten(0, 1),
            weights_Tk,
            experts.gate_up,
            experts.down,
        )
        out = out_TH.view(hidden_states.shape)
        return (out if shared is None else out + shared), None


class Placement(NamedTuple):
    """Assignments sorted by expert."""

    token_A: Tensor
    """Token of each sorted assignment."""
    order_A: Tensor
    """Place in the flat [T * k] of each sorted assignment."""
    place_Tk: Tensor
    """Where each choice of each token went."""
    ends_E: Tensor
    """int32; one past the last assignment of each expert."""


def placement(ids_Tk: Tensor, num_experts: int) -> Placement:
    """Sort the chosen experts' ids, on their device."""
    ids_A = ids_Tk.flatten()
    if num_experts <= torch.iinfo(torch.int16).max:
        ids_A = ids_A.to(torch.int16)  # a quarter of the radix passes
    sorted_A, order_A = ids_A.sort(stable=True)
    place_A = torch.empty_like(order_A)
    place_A[order_A] = torch.arange(order_A.numel(), device=order_A.device)
    experts_E = torch.arange(num_experts, device=ids_A.device, dtype=sorted_A.dtype)
    ends_E = torch.searchsorted(sorted_A, experts_E, right=True, out_int32=True)
    return Placement(order_A // ids_Tk.shape[1], order_A, place_A.view(ids_Tk.shape), ends_E)


class _Experts(Function):
    """sum over a token's experts of weight * down(swiglu(gate_up x)), as grouped GEMMs both ways.

    A row's gradient goes back to its token by the same sum over places that joins the experts' outputs, so nothing
    is added atomically and a repeated run gives the same bits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kernels: ModuleType,
        limit: float | None,
        keeps_inputs: bool,
        ids_Tk: Tensor,
        x_TH: Tensor,
        weights_Tk: Tensor,
        gate_up_E2FH: Tensor,
        down_EHF: Tensor,
    ) -> Tensor:
        ctx.kernels, ctx.limit, ctx.weights_dtype = kernels, limit, weights_Tk.dtype
        where = placement(ids_Tk, gate_up_E2FH.shape[0])
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
        weights_grad_Tk = weights_grad_A[where.place_Tk].to(ctx.weights_dtype)
        return None, None, None, None, x_grad_TH, weights_grad_Tk, gate_up_grad, down_grad
