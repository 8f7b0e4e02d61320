"""What every layer of the rollout shares: residual wiring, MLPs and experts over the ranks, embedding, head.

The rows of a rollout replica are replicated inside its tensor-parallel group, so that each block ends in one
sum, taken with the norm that follows it; there is no sequence parallelism here.

Shape legend: R rows of this replica, G rows of all replicas of an expert-parallel group, H hidden size,
F width of an MLP, v this rank's vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.errors import UserError
from bailing_mtp.kernels.reference.experts import SharedExpert
from bailing_mtp.parallel import vocab
from bailing_mtp.parallel.collectives import all_gather, sum_scatter
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.rollout.routes import RouteRecord
from bailing_mtp.weights.view import DenseWeights, LayerWeights, MoeWeights

Mix = Callable[[Tensor], Tensor]
"""Normalised input [R, H] -> this rank's part of the mixer's output [R, H]."""


class TpSums(Protocol):
    """Sums over the tensor-parallel ranks in another way than the group's library, such as peers.PeerSums."""

    def __call__(self, x: Tensor) -> Tensor:
        """The sum; `x` may hold it too."""
        ...

    def add_rms_norm(self, x_RH: Tensor, part_RH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x + the sum of the ranks' parts, and its norm."""
        ...


class Stream(NamedTuple):
    """The residual stream between two blocks."""

    x_RH: Tensor
    added_RH: Tensor | None = None
    """What the last block adds, left to the norm that follows: this rank's part of a sum over tensor parallel."""
    summed: bool = False
    """Whether added_RH is the sum."""


@dataclass(frozen=True)
class ExpertLayout:
    """Which part of the experts this rank computes, and for whose rows.

    ep = tp: its own experts. ep < tp: the tp / ep ranks with the same experts take disjoint slices of their
    width. ep > tp: its own experts, for the rows of all ep / tp replicas of its expert-parallel group, which
    must call with equal shapes at the same time.
    """

    replicas: int
    """Replicas whose rows are gathered; 1 unless ep > tp."""
    replica: int
    """This rank's replica among them."""
    slices: int
    """Ranks of the tensor-parallel group that hold the same experts."""
    slice: int

    @staticmethod
    def of(context: ParallelContext) -> ExpertLayout:
        """Raises UserError when neither of tp and ep divides the other."""
        tp, ep = context.tp, context.ep
        if max(tp, ep) % min(tp, ep):
            raise UserError(
                f"parallel.ep: {ep} with parallel.tp = {tp} cannot generate; allowed: a multiple or a divisor of {tp}"
            )
        # Both groups are consecutive ranks, so that ranks of equal ep_rank in a TP group are ep apart.
        return ExpertLayout(
            replicas=max(1, ep // tp),
            replica=context.ep_rank // tp if ep > tp else 0,
            slices=max(1, tp // ep),
            slice=context.tp_rank // ep if ep < tp else 0,
        )

    def width_slice(self, width: int) -> tuple[int, int]:
        """First and one past the last channel that this rank takes of an expert."""
        return width * self.slice // self.slices, width * (self.slice + 1) // self.slices

    def shared_slice(self, width: int) -> tuple[int, int]:
        """The same of its shard of the shared expert, for the rows of all replicas: each of them takes a part."""
        return width * self.replica // self.replicas, width * (self.replica + 1) // self.replicas


@dataclass(frozen=True)
class Compute:
    """The layer arithmetic of one rank. `kernels`: a module such as kernels.reference.decode; `run_experts`: its
    `experts`, or another function like it.
    """

    arch: Architecture
    context: ParallelContext
    kernels: ModuleType
    experts: ExpertLayout
    run_experts: Callable[..., Tensor]
    peers: TpSums | None = None
    """Sums the tensor-parallel ranks' tensors in place of the group's library."""

    def layer(
        self, weights: LayerWeights, at: Stream, mix: Mix, record: RouteRecord | None = None
    ) -> Stream:
        """One pre-norm residual layer: mixer, then MLP. `record` is given the chosen experts of an expert layer."""
        x_RH, normed_RH = self.joined(at, weights.input_norm_H)
        x_RH, normed_RH = self.joined(Stream(x_RH, mix(normed_RH)), weights.post_norm_H)
        if isinstance(weights.mlp, MoeWeights):
            return self._moe(weights.mlp, normed_RH, x_RH, record)
        return Stream(x_RH, self._dense(weights.mlp, normed_RH))

    def joined(self, at: Stream, weight_H: Tensor) -> tuple[Tensor, Tensor]:
        """The residual with all that was added to it, and its norm."""
        x_RH, added_RH, eps = at.x_RH, at.added_RH, self.arch.rms_norm_eps
        if added_RH is None:
            return x_RH, self.norm(x_RH, weight_H)
        if self.peers is not None and not at.summed:
            return self.peers.add_rms_norm(x_RH, added_RH, weight_H, eps)
        added_RH = added_RH if at.summed else self.sum_over_tp(added_RH)
        return self.kernels.add_rms_norm(x_RH, added_RH, weight_H, eps)

    def norm(self, x_RH: Tensor, weight_H: Tensor) -> Tensor:
        return self.kernels.rms_norm(x_RH, weight_H, self.arch.rms_norm_eps)

    def embed(self, ids_R: Tensor, embedding_vH: Tensor) -> Tensor:
        """[R, H]; an id outside the vocabulary gives zeros."""
        first_id = self.context.tp_rank * embedding_vH.shape[0]
        return self.sum_over_tp(self.kernels.embed(ids_R, embedding_vH, first_id))

    def logits(self, hidden_RH: Tensor, head_vH: Tensor, out_Rv: Tensor | None = None) -> Tensor:
        """[R, v] in fp32, never rounded to less; in `out_Rv` if given."""
        return vocab.head_logits(hidden_RH, head_vH, out_Rv)

    def sum_over_tp(self, x: Tensor) -> Tensor:
        """Sum of the ranks' parts; `x` may hold it too."""
        if self.peers is not None:
            return self.peers(x)
        return self._sum(x, self.context.tp, self.context.tp_group)

    def _dense(self, weights: DenseWeights, x_RH: Tensor) -> Tensor:
        linear = self.kernels.linear
        gate_RF, up_RF = linear(x_RH, weights.gate_up_2FH).chunk(2, dim=-1)
        return linear(self.kernels.swiglu(gate_RF, up_RF, weights.limit), weights.down_HF)

    def _moe(
        self, weights: MoeWeights, x_RH: Tensor, residual_RH: Tensor, record: RouteRecord | None
    ) -> Stream:
        """Experts' outputs, beside the residual or with it."""
        arch, layout, shared = self.arch, self.experts, weights.shared
        rows_GH = self._gather(x_RH)
        ids_Gk, weights_Gk = self.kernels.route(
            rows_GH,
            weights.router_EH,
            weights.expert_bias_E,
            arch.num_groups,
            arch.groups_per_token,
            arch.experts_per_token,
            arch.routed_scaling_factor,
        )
        if record is not None:
            record.add(ids_Gk.unflatten(0, (layout.replicas, -1))[layout.replica])
        # One rank's sum is whole.
        alone = self.context.tp == self.context.ep == 1
        y_GH = self.run_experts(
            rows_GH,
            ids_Gk,
            weights_Gk,
            weights.gate_up_e2FH,
            weights.down_eHF,
            # Experts lie in blocks by expert-parallel rank.
            self.context.ep_rank * weights.down_eHF.shape[0],
            layout.width_slice(weights.down_eHF.shape[2]),
            weights.limit,
            # Split over all ranks of the sum, which its parts join.
            None if shared is None else self._shared(shared),
            residual_RH if alone else None,
        )
        if alone:
            return Stream(y_GH)
        if layout.replicas == 1:
            return Stream(residual_RH, y_GH)
        if self.context.tp == 1:
            return Stream(residual_RH, sum_scatter(y_GH, self.context.ep_group), summed=True)
        self._sum(y_GH, self.context.ep, self.context.ep_group)
        return Stream(residual_RH, y_GH.unflatten(0, (layout.replicas, -1))[layout.replica], summed=True)

    def _shared(self, weights: DenseWeights) -> SharedExpert:
        channels = self.experts.shared_slice(weights.down_HF.shape[1])
        return self.kernels.SharedExpert(weights.gate_up_2FH, weights.down_HF, weights.limit, channels)

    def _gather(self, x_RH: Tensor) -> Tensor:
        """Rows of all replicas of the expert-parallel group, one copy of each tensor-parallel group's."""
        if self.experts.replicas == 1:
            return x_RH
        return all_gather(x_RH, self.context.ep_group)[:: self.context.tp].flatten(0, 1)

    @staticmethod
    def _sum(x: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
        if size > 1:
            x = x.contiguous()
            dist.all_reduce(x, group=group)
        return x
