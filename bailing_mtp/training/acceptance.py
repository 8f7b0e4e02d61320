"""Acceptance of drafts, predicted by forward passes over the policy's own samples.

A decode step with k drafts starts at site t when the token at t+1 is pending. Steps do not start everywhere: a step
that accepts a drafts starts the next one at t+a+1, so that sites are weighted by the probability v that a step
starts there, v[t+a+1] += v[t] * P(a accepted at t). Unweighted, hard tokens would count too little.

Shapes: T tokens of a pack, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from bailing_mtp.contracts.batch import TokenBatch
from bailing_mtp.losses.chunked import chunk_tokens_for
from bailing_mtp.losses.heads import HeadOptions, HeadOutputs, head_outputs
from bailing_mtp.model.build import BuiltModel
from bailing_mtp.model.trunk import sequence_shard
from bailing_mtp.parallel.context import ParallelContext


@torch.no_grad()
def draft_chain(
    built: BuiltModel, batch: TokenBatch, context: ParallelContext, temperature: float, depths: int
) -> HeadOutputs:
    """Trunk and `depths` unrolled MTP depths over one pack, acceptance at `temperature`; [T] fields as padded.

    Collective over the tensor- and expert-parallel groups; equal on tensor-parallel ranks. Modules in eval mode.
    """
    assert built.mtp is not None, "acceptance needs an MTP layer"
    batch = batch.padded_to(built.trunk.token_multiple).to(context.device)
    trunk, ahead = built.trunk, range(1, depths + 1)
    hidden = trunk(batch)
    chain = built.mtp(
        [trunk.embed(batch.token_ahead(depth)) for depth in ahead],
        hidden,
        [trunk.rope(batch.layout.position_ids_T + depth - 1) for depth in ahead],
        batch.layout,
        [sequence_shard(batch.layout.padding_T, context)] * depths,
    )
    options = HeadOptions(chunk_tokens_for(trunk.head_weight.shape[0]), temperature=temperature)
    mtp_TH = tuple(_whole(stream, context) for stream in chain)
    return head_outputs(_whole(hidden, context), mtp_TH, trunk.head_weight, batch, context.tp_group, options)


@dataclass
class Ratio:
    """A ratio of sums over documents, and its standard error with documents as clusters."""

    numerators: list[float] = field(default_factory=list)
    denominators: list[float] = field(default_factory=list)
    sites: int = 0

    def add(self, numerator: float, denominator: float, sites: int) -> None:
        """One document."""
        self.numerators.append(numerator)
        self.denominators.append(denominator)
        self.sites += sites

    def merge(self, other: Ratio) -> None:
        self.numerators += other.numerators
        self.denominators += other.denominators
        self.sites += other.sites

    @property
    def value(self) -> float:
        """NaN without observations."""
        total = sum(self.denominators)
        return sum(self.numerators) / total if total > 0 else math.nan

    @property
    def standard_error(self) -> float:
        """NaN for fewer than two documents."""
        n, total, value = len(self.numerators), sum(self.denominators), self.value
        if n < 2 or not total > 0:
            return math.nan
        pairs = zip(self.numerators, self.denominators, strict=True)
        spread = sum((numerator - value * denominator) ** 2 for numerator, denominator in pairs)
        return math.sqrt(n / (n - 1) * spread) / total


Estimates = dict[str, Ratio]


def document_estimates(heads: HeadOutputs, begin: int, end: int, first_site: int) -> Estimates:
    """Estimates of one document, tokens begin .. end - 1 of the pack; its samples are drawn from `first_site` on.

    nll_1, nll_2: of tokens t+1 (trunk) and t+2 (MTP); top1: MTP argmax = trunk argmax; alpha_1: acceptance of the
    first draft at every site; accept_length_k{k}, and alpha_{d}_k{k} given that depth d - 1 was accepted, for
    steps of k drafts.
    """
    found: Estimates = {}

    def mean(name: str, values_T: Tensor, ahead: int) -> None:
        values = values_T[first_site : max(first_site, end - ahead)].double()
        found[name] = Ratio()
        found[name].add(float(values.sum()), float(len(values)), len(values))

    mean("nll_1", -heads.log_prob_T, 1)
    mean("nll_2", heads.depths[0].loss_T, 2)
    mean("top1", heads.depths[0].agree_T, 2)
    mean("alpha_1", heads.depths[0].accept_T, 2)
    accept = [depth.accept_T[first_site:end].tolist() for depth in heads.depths]
    ratio = [depth.ratio_T[first_site:end].tolist() for depth in heads.depths]
    for k in range(1, len(accept) + 1):
        found |= _steps(accept[:k], ratio[:k])
    return found


def _steps(accept: Sequence[Sequence[float]], ratio: Sequence[Sequence[float]]) -> Estimates:
    """Steps of k = len(accept) drafts along one document's sites, the first of which starts one for certain."""
    k = len(accept)
    # The last k + 1 sites have no token for the deepest draft.
    n_sites = max(0, len(accept[0]) - 1 - k)
    starts = [0.0] * (n_sites + k + 1)
    starts[0] = 1.0
    reached, accepted = [0.0] * k, [0.0] * k
    for site in range(n_sites):
        here = starts[site]
        for depth in range(k):
            reached[depth] += here
            accepted[depth] += here * accept[depth][site]
            starts[site + depth + 1] += here * (1.0 - ratio[depth][site])
            here *= ratio[depth][site]
        starts[site + k + 1] += here
    found = {f"accept_length_k{k}": Ratio()}
    found[f"accept_length_k{k}"].add(reached[0] + sum(accepted), reached[0], n_sites)
    for depth in range(k):
        name = f"alpha_{depth + 1}_k{k}"
        found[name] = Ratio()
        found[name].add(accepted[depth], reached[depth], n_sites)
    return found


def merged(parts: Sequence[Estimates]) -> Estimates:
    """Estimates over several documents, or of several ranks."""
    total: Estimates = {}
    for part in parts:
        for name, ratio in part.items():
            total.setdefault(name, Ratio()).merge(ratio)
    return total


def _whole(stream: Tensor, context: ParallelContext) -> Tensor:
    if context.tp > 1:
        stream = gather_from_sequence_parallel_region(stream, group=context.tp_group)
    return stream.squeeze(1)
