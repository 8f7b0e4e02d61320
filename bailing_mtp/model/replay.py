"""Experts that a rollout chose, chosen again by the trainer's routers.

The choice is the rollout's; weights, and with them the router's gradient, are the trainer's own scores of the chosen
experts. Source: "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers" (rollout routing
replay), arXiv 2510.11370.

Shapes: T tokens of the pack, t of this rank's sequence shard, L expert layers of the trunk, k experts per token.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.contracts.batch import PackedLayout
from bailing_mtp.parallel.context import ParallelContext


@dataclass(frozen=True)
class RouteReplay:
    """Recorded choices of one forward pass, and how many of them the routers would have made themselves."""

    routes_tLk: Tensor
    """int16, this rank's tokens; -1 where nothing is recorded: a router then chooses itself."""
    agreed: Tensor
    """int64 scalar, on this rank."""
    context: ParallelContext

    @staticmethod
    def of(routes_TLk: Tensor | None, context: ParallelContext) -> RouteReplay | None:
        """For one pass over a pack with these routes; None without them."""
        if routes_TLk is None:
            return None
        routes_tLk = routes_TLk.chunk(context.tp)[context.tp_rank]
        return RouteReplay(routes_tLk, torch.zeros((), dtype=torch.int64, device=routes_tLk.device), context)

    def check(self, arch: Architecture) -> None:
        """AssertionError for routes of another model, such as one with the MTP layer's among them."""
        expected = (arch.n_expert_layers, arch.experts_per_token)
        assert self.routes_tLk.shape[1:] == expected, f"routes {tuple(self.routes_tLk.shape)} for {expected}"

    def chosen(self, layer: int, own_ids_tk: Tensor) -> Tensor:
        """Expert ids [t, k] of expert layer `layer`, whose router would choose `own_ids_tk`."""
        ids_tk = self.routes_tLk[:, layer].long()
        self.agreed.add_((ids_tk.unsqueeze(-1) == own_ids_tk.unsqueeze(-2)).sum())
        return torch.where(ids_tk >= 0, ids_tk, own_ids_tk)

    def n_agreed(self) -> Tensor:
        """Agreeing choices of all ranks of the tensor-parallel group so far, fp32. Collective."""
        total = self.agreed.float()
        if self.context.tp > 1:
            dist.all_reduce(total, group=self.context.tp_group)
        return total


class Pack(NamedTuple):
    """What megatron-core hands to every layer of the trunk as `packed_seq_params`, also when it recomputes one."""

    layout: PackedLayout
    replay: RouteReplay | None


class TrunkLayer(TransformerLayer):
    """megatron-core's layer, which gives its router the recorded choices for as long as it runs.

    expert_layer: its number among the layers that route, None for one that does not.
    """

    def __init__(self, config: TransformerConfig, *args: Any, expert_layer: int | None, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._expert_layer = expert_layer

    def forward(self, *args: Any, packed_seq_params: Pack, **kwargs: Any) -> tuple[Tensor, Any]:
        """As megatron-core's; the mixer is handed the layout alone."""
        layout, replay = packed_seq_params
        replaying = contextlib.nullcontext()
        if replay is not None and self._expert_layer is not None:
            replaying = self.mlp.router.replaying(replay, self._expert_layer)
        with replaying:
            return super().forward(*args, packed_seq_params=layout, **kwargs)
