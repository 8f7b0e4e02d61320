"""Sigmoid router with group-limited top-k and an online selection bias.

Shapes: t tokens of this rank, E experts, k experts per token.
Source: Bailing V3 spec section 2.3.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from bailing_mtp.model.replay import RouteReplay

BEST_PER_GROUP = 2
"""A group's score is the sum of its best two experts, whatever k and the number of chosen groups are."""


def select_experts(selection_tE: Tensor, num_groups: int, groups_per_token: int, experts_per_token: int) -> Tensor:
    """Expert ids [t, k]: the best k of the best groups, by selection score (scores plus bias)."""
    if num_groups > 1:
        grouped = selection_tE.unflatten(-1, (num_groups, -1))
        group_score = grouped.topk(BEST_PER_GROUP, dim=-1).values.sum(dim=-1)
        chosen = torch.zeros_like(group_score, dtype=torch.bool)
        chosen.scatter_(-1, group_score.topk(groups_per_token, dim=-1).indices, True)
        selection_tE = grouped.masked_fill(~chosen[..., None], float("-inf")).flatten(-2)
    return selection_tE.topk(experts_per_token, dim=-1).indices


def route_weights(scores_tE: Tensor, expert_ids_tk: Tensor, scaling: float) -> Tensor:
    """Weights [t, k]: the chosen experts' scores (without bias), normalised to sum to `scaling`."""
    chosen_tk = scores_tE.gather(-1, expert_ids_tk)
    return chosen_tk / (chosen_tk.sum(dim=-1, keepdim=True) + 1e-20) * scaling


class GroupLimitedRouter(TopKRouter):
    """megatron-core's router with this model's selection rule and a count that leaves masked tokens out.

    The bias moves by the rate times sign(mean - count) once per optimizer step (megatron-core's
    finalize_model_grads); its counts come from here. Replayed choices count like own ones: the bias balances
    the experts that were used.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
        weight_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection, is_mtp_layer=is_mtp_layer)
        if weight_dtype is not None and self.weight.dtype is not weight_dtype:
            sequence_parallel = self.weight.sequence_parallel
            self.weight = nn.Parameter(self.weight.data.to(weight_dtype))
            self.weight.sequence_parallel = sequence_parallel
        if not config.use_cpu_initialization and not self.weight.is_meta:
            self.weight.data = self.weight.data.to(torch.cuda.current_device())
        self._replay: tuple[RouteReplay, int] | None = None

    @contextlib.contextmanager
    def replaying(self, replay: RouteReplay, layer: int) -> Iterator[None]:
        """Take the choices that `replay` holds for expert layer `layer` while the block runs."""
        self._replay = (replay, layer)
        try:
            yield
        finally:
            self._replay = None

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Route weights and map, both [t, E], from fp32 logits; `padding_mask` is True on tokens not to count."""
        logits_tE = logits.view(-1, self.num_experts)
        scores_tE = torch.sigmoid(logits_tE.float())
        expert_ids_tk = select_experts(
            scores_tE.detach() + self.expert_bias,
            self.config.moe_router_num_groups,
            self.config.moe_router_group_topk,
            self.topk,
        )
        expert_ids_tk = self._replayed(expert_ids_tk)
        routing_map = torch.zeros_like(scores_tE, dtype=torch.bool).scatter_(-1, expert_ids_tk, True)
        self._count(routing_map, padding_mask)
        weights_tk = route_weights(scores_tE, expert_ids_tk, self.config.moe_router_topk_scaling_factor)
        return torch.zeros_like(scores_tE).scatter(-1, expert_ids_tk, weights_tk), routing_map

    def chosen(self, hidden: Tensor, padding_mask: Tensor | None, kernels: ModuleType) -> tuple[Tensor, Tensor]:
        """Expert ids and fp32 route weights, both [t, k], of [s, 1, H]; as `routing`, which lays them out over all
        experts. `padding_mask` [1, s] is True on tokens not to count; `kernels.choose` chooses.
        """
        self._maintain_float32_expert_bias()
        logits_tE = self.gating(hidden).view(-1, self.num_experts)
        config = self.config
        expert_ids_tk, _ = kernels.choose(
            logits_tE.detach().float(),
            self.expert_bias,
            config.moe_router_num_groups,
            config.moe_router_group_topk,
            self.topk,
            config.moe_router_topk_scaling_factor,
        )
        expert_ids_tk = self._replayed(expert_ids_tk)
        scores_tk = torch.sigmoid(logits_tE.float().gather(-1, expert_ids_tk))
        weights_tk = scores_tk / (scores_tk.sum(dim=-1, keepdim=True) + 1e-20) * config.moe_router_topk_scaling_factor
        if self.training and torch.is_grad_enabled():
            self._count(torch.zeros_like(logits_tE, dtype=torch.bool).scatter_(-1, expert_ids_tk, True), padding_mask)
        return expert_ids_tk, weights_tk

    def _replayed(self, own_ids_tk: Tensor) -> Tensor:
        if self._replay is None:
            return own_ids_tk
        replay, layer = self._replay
        return replay.chosen(layer, own_ids_tk)

    def _count(self, routing_map: Tensor, padding_mask: Tensor | None) -> None:
        # Under full recompute the first forward runs without gradients, so each token counts once.
        if not self.training or not torch.is_grad_enabled():
            return
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask.reshape(-1, 1)
        self.local_tokens_per_expert += routing_map.sum(dim=0)
