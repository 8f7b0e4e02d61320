"""What a recipe minimises: from modules and a microbatch to one scalar and the sums that metrics are made of.

Shapes: T tokens of the pack, s of this rank's sequence shard, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from bailing_mtp.config import MtpConfig
from bailing_mtp.contracts.batch import TokenBatch
from bailing_mtp.contracts.sites import DraftSites, HeadRows
from bailing_mtp.losses.heads import HeadOptions, HeadOutputs, chosen_chunk_tokens, head_outputs, reach
from bailing_mtp.model.replay import RouteReplay
from bailing_mtp.model.trunk import sequence_shard
from bailing_mtp.training.state import TrainState


class LossTerms(NamedTuple):
    """One microbatch's share of the step's loss."""

    total: Tensor
    """Scalar to differentiate: every term a sum already divided by its count over the whole step."""
    sums: dict[str, Tensor]
    """Name -> undivided sum, of metrics and of data-dependent denominators; see `Objective.denominators`."""


class Objective(Protocol):
    """Counts first (on the host, before any forward of the step), then losses."""

    def count(self, batch: TokenBatch) -> dict[str, int]:
        """Numbers of sites of this microbatch, by count name."""
        ...

    def denominators(self) -> dict[str, str]:
        """Metric name -> name of the count or sum that divides it; other sums are not metrics."""
        ...

    def __call__(self, state: TrainState, batch: TokenBatch, counts: Mapping[str, float]) -> LossTerms:
        """Losses of one microbatch; `counts` are summed over data-parallel ranks and all microbatches of the step."""
        ...


@dataclass(frozen=True)
class PretrainObjective:
    """lm + loss_scale * sum_d depth_decay^(d-1) * L_d (architecture: MTP objective).

    Every L is a sum over its own sites divided by its own global count. `mtp.loss_scale` None leaves the MTP
    layer out altogether. depths: to evaluate more depths than `mtp.depth` trains. chunk_tokens: None chooses.
    """

    mtp: MtpConfig
    depths: int | None = None
    chunk_tokens: int | None = None

    @property
    def n_depths(self) -> int:
        return 0 if self.mtp.loss_scale is None else self.depths or self.mtp.depth

    def count(self, batch: TokenBatch) -> dict[str, int]:
        return {_sites(depth): int(batch.shift(depth).valid_T.sum()) for depth in range(self.n_depths + 1)}

    def denominators(self) -> dict[str, str]:
        return {"train/lm_loss": _sites(0), "train/accuracy": _sites(0), **self.mtp_denominators()}

    def __call__(self, state: TrainState, batch: TokenBatch, counts: Mapping[str, float]) -> LossTerms:
        heads = self.heads(state, batch)
        valid_T = batch.shift(0).valid_T
        lm_sum = torch.where(valid_T, -heads.log_prob_T, 0.0).sum()
        mtp = self.mtp_loss(heads, batch, counts)
        total = lm_sum / max(1.0, counts[_sites(0)])
        sums = {"train/lm_loss": lm_sum.detach(), "train/accuracy": (heads.correct_T * valid_T).sum()}
        return LossTerms(total if mtp is None else total + mtp.total, sums | ({} if mtp is None else mtp.sums))

    def mtp_denominators(self) -> dict[str, str]:
        """Of the sums of `mtp_loss`."""
        names = {}
        for depth in range(1, self.n_depths + 1):
            names |= {
                f"mtp/loss_depth{depth}": _sites(depth),
                f"mtp/top1_depth{depth}": _sites(depth),
                f"mtp/accept_depth{depth}": f"mtp/reach_depth{depth}",
            }
        return names

    def mtp_loss(self, heads: HeadOutputs, batch: TokenBatch, counts: Mapping[str, float]) -> LossTerms | None:
        """The MTP terms alone, for objectives with another main loss; None when the MTP loss is off."""
        total, sums = None, {}
        for depth, weights_T in enumerate(reach(heads.depths), start=1):
            outputs = heads.depths[depth - 1]
            valid_T = batch.shift(depth).valid_T
            loss_sum = torch.where(valid_T, outputs.loss_T, 0.0).sum()
            if depth <= self.mtp.depth:
                weight = self.mtp.loss_scale * self.mtp.depth_decay ** (depth - 1)
                term = weight * (loss_sum / max(1.0, counts[_sites(depth)]))
                total = term if total is None else total + term
            reached_T = torch.where(valid_T, weights_T, 0.0)
            sums |= {
                f"mtp/loss_depth{depth}": loss_sum.detach(),
                f"mtp/top1_depth{depth}": (outputs.agree_T * valid_T).sum(),
                f"mtp/accept_depth{depth}": (outputs.accept_T * reached_T).sum(),
                f"mtp/reach_depth{depth}": reached_T.sum(),
            }
        return None if total is None else LossTerms(total, sums)

    def heads(
        self,
        state: TrainState,
        batch: TokenBatch,
        policy_temperature: float = 1.0,
        with_entropy: bool = False,
        replay: RouteReplay | None = None,
    ) -> HeadOutputs:
        """Forward of trunk, MTP layer and heads over one microbatch; acceptance, too, is at `policy_temperature`.

        Heads work at sites with a target alone, and so does the MTP layer where it need not see the rest; under
        sequence parallel the layer works on every site, because its shards are cut by site.
        """
        hidden = state.trunk(batch, replay)
        weight_vH = state.trunk_module.head_weight
        kernels = state.trunk_module.head_kernels
        options = HeadOptions(
            chunk_tokens=self.chunk_tokens or chosen_chunk_tokens(weight_vH.shape[0], kernels),
            objective=self.mtp.objective,
            detach_mtp=self.mtp.detach,
            temperature=policy_temperature,
            policy_temperature=policy_temperature,
            with_entropy=with_entropy,
            kernels=kernels,
        )
        part = DraftSites.of(batch, self.n_depths) if self.n_depths and state.context.tp == 1 else None
        mtp = tuple(whole_sequence(x, state) for x in self._mtp_hidden(state, hidden, batch, part))
        rows = HeadRows.of(batch, self.n_depths, part)
        trunk_TH = whole_sequence(hidden, state)
        return head_outputs(trunk_TH, mtp, weight_vH, batch, state.context.tp_group, options, rows)

    def _mtp_hidden(
        self, state: TrainState, hidden: Tensor, batch: TokenBatch, part: DraftSites | None
    ) -> tuple[Tensor, ...]:
        if self.n_depths == 0:
            return ()
        assert state.mtp is not None, "mtp.loss_scale is set but the state has no MTP layer"
        trunk, depths = state.trunk_module, range(1, self.n_depths + 1)
        ids = [batch.token_ahead(depth) for depth in depths]
        positions = [batch.layout.position_ids_T + depth - 1 for depth in depths]
        uncounted = [sequence_shard(~batch.shift(depth).valid_T, state.context) for depth in depths]
        if part is not None:
            sites = [part.keys_K, *(part.sites_Q for _ in depths[1:])]
            ids, positions = ([x_T[at] for x_T, at in zip(values, sites, strict=True)] for values in (ids, positions))
            uncounted = [x_T[part.sites_Q] for x_T in uncounted]
            hidden = hidden.index_select(0, part.keys_K)
        embeddings, ropes = [trunk.embed(x) for x in ids], [trunk.rope(x) for x in positions]
        if self.mtp.detach:
            embeddings, hidden = [x.detach() for x in embeddings], hidden.detach()
        return state.mtp(embeddings, hidden, ropes, batch.layout, uncounted, part)


def _sites(depth: int) -> str:
    """Name of the count of a depth's valid sites; depth 0 is the language model."""
    return f"sites_depth{depth}"


def whole_sequence(hidden: Tensor, state: TrainState) -> Tensor:
    """[s, 1, H] of this rank -> [T, H]; its backward sums the ranks' gradients and cuts them again."""
    if state.context.tp > 1:
        hidden = gather_from_sequence_parallel_region(hidden, group=state.context.tp_group)
    return hidden.squeeze(1)
