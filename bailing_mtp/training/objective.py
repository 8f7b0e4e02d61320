"""What a recipe minimises: from modules and a microbatch to one scalar and the sums that metrics are made of.

Shapes: T tokens of the pack, s of this rank's sequence shard, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from bailing_mtp.config import MtpConfig
from bailing_mtp.contracts.batch import TokenBatch
from bailing_mtp.losses.lm import cross_entropy_sum
from bailing_mtp.model.trunk import sequence_shard
from bailing_mtp.training.state import TrainState


class LossTerms(NamedTuple):
    """One microbatch's share of the step's loss."""

    total: Tensor
    """Scalar to differentiate: every term a sum already divided by its count over the whole step."""
    sums: dict[str, Tensor]
    """Metric name -> undivided sum; `Objective.denominators` names what divides it."""


class Objective(Protocol):
    """Counts first (on the host, before any forward of the step), then losses."""

    def count(self, batch: TokenBatch) -> dict[str, int]:
        """Numbers of sites of this microbatch, by count name."""
        ...

    def denominators(self) -> dict[str, str]:
        """Metric name -> count name."""
        ...

    def __call__(self, state: TrainState, batch: TokenBatch, counts: Mapping[str, float]) -> LossTerms:
        """Losses of one microbatch; `counts` are summed over data-parallel ranks and all microbatches of the step."""
        ...


@dataclass(frozen=True)
class PretrainObjective:
    """lm + loss_scale * mtp, each term a sum over its own sites divided by its own global count
    (architecture: MTP objective). `mtp.loss_scale` None leaves the MTP term out.
    """

    mtp: MtpConfig
    chunk_tokens: int = 1024

    def count(self, batch: TokenBatch) -> dict[str, int]:
        counts = {"lm_sites": int(batch.shift(0).valid_T.sum())}
        if self.mtp.loss_scale is not None:
            counts["mtp_sites_depth1"] = int(batch.shift(1).valid_T.sum())
        return counts

    def denominators(self) -> dict[str, str]:
        names = {"train/lm_loss": "lm_sites", "train/accuracy": "lm_sites"}
        if self.mtp.loss_scale is not None:
            names |= {"mtp/loss_depth1": "mtp_sites_depth1", "mtp/accuracy_depth1": "mtp_sites_depth1"}
        return names

    def __call__(self, state: TrainState, batch: TokenBatch, counts: Mapping[str, float]) -> LossTerms:
        hidden = state.trunk(batch)
        lm = self._cross_entropy(state, hidden, batch, depth=0)
        total = lm.loss_sum / max(1.0, counts["lm_sites"])
        sums = {"train/lm_loss": lm.loss_sum.detach(), "train/accuracy": lm.correct_sum}
        if self.mtp.loss_scale is not None:
            mtp = self._cross_entropy(state, self._mtp_hidden(state, hidden, batch), batch, depth=1)
            total = total + self.mtp.loss_scale * mtp.loss_sum / max(1.0, counts["mtp_sites_depth1"])
            sums |= {"mtp/loss_depth1": mtp.loss_sum.detach(), "mtp/accuracy_depth1": mtp.correct_sum}
        return LossTerms(total, sums)

    def _mtp_hidden(self, state: TrainState, hidden: Tensor, batch: TokenBatch) -> Tensor:
        assert state.mtp is not None, "mtp.loss_scale is set but the state has no MTP layer"
        trunk = state.trunk_module
        embedded = trunk.embed(batch.token_ahead(1))
        uncounted_s = sequence_shard(~batch.shift(1).valid_T, state.context)
        return state.mtp(embedded, hidden, trunk.rope(batch.layout.position_ids_T), batch.layout, uncounted_s)

    def _cross_entropy(self, state: TrainState, hidden: Tensor, batch: TokenBatch, depth: int):
        shift = batch.shift(depth)
        return cross_entropy_sum(
            whole_sequence(hidden, state),
            state.trunk_module.head_weight,
            shift.target_ids_T,
            shift.valid_T,
            state.context.tp_group,
            self.chunk_tokens,
        )


def whole_sequence(hidden: Tensor, state: TrainState) -> Tensor:
    """[s, 1, H] of this rank -> [T, H]; its backward sums the ranks' gradients and cuts them again."""
    if state.context.tp > 1:
        hidden = gather_from_sequence_parallel_region(hidden, group=state.context.tp_group)
    return hidden.squeeze(1)
