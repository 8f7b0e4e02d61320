"""Direct preference optimisation: the objective, and the reference model's log-probabilities.

The reference model is the policy before its first step, so its log-probabilities are computed once, by the weights
that training then changes; no second copy of the model exists.

Shapes: T tokens of the pack, N documents, P pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bailing_mtp.config import MtpConfig, PreferenceConfig
from bailing_mtp.contracts.batch import TokenBatch
from bailing_mtp.contracts.pairs import PairBatch
from bailing_mtp.losses.documents import document_sums
from bailing_mtp.losses.dpo import dpo_metrics, dpo_terms
from bailing_mtp.model.build import BuiltModel
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.training.objective import LossTerms, PretrainObjective
from bailing_mtp.training.scoring import score_batch
from bailing_mtp.training.state import TrainState

PAIRS = "pairs"


@dataclass(frozen=True)
class DpoObjective:
    """Mean DPO loss over the step's pairs, plus the detached MTP loss on chosen rows (architecture: MTP objective).

    Batches must be PairBatch. A row's log-probability is the sum over its trained tokens.
    """

    dpo: PreferenceConfig
    mtp: MtpConfig
    chunk_tokens: int | None = None

    @property
    def _tokens(self) -> PretrainObjective:
        return PretrainObjective(self.mtp, chunk_tokens=self.chunk_tokens)

    def count(self, batch: TokenBatch) -> dict[str, int]:
        assert isinstance(batch, PairBatch), "dpo trains on pairs"
        return {PAIRS: batch.n_pairs, **self._tokens.count(batch)}

    def denominators(self) -> dict[str, str]:
        names = ("loss", "accuracy", "margin", "chosen_reward", "rejected_reward")
        return {**{f"dpo/{name}": PAIRS for name in names}, **self._tokens.mtp_denominators()}

    def __call__(self, state: TrainState, batch: TokenBatch, counts: Mapping[str, float]) -> LossTerms:
        assert isinstance(batch, PairBatch), "dpo trains on pairs"
        heads = self._tokens.heads(state, batch)
        rows_N = document_sums(heads.log_prob_T, batch.shift(0).valid_T, batch.layout)
        policy_P2 = rows_N[: 2 * batch.n_pairs].view(-1, 2)
        terms = dpo_terms(policy_P2, batch.reference_P2, self.dpo.beta, self.dpo.label_smoothing)
        total = terms.loss_P.sum() / max(1.0, counts[PAIRS])
        sums = dpo_metrics(terms)
        mtp = self._tokens.mtp_loss(heads, batch, counts)
        return LossTerms(total, sums) if mtp is None else LossTerms(total + mtp.total, sums | mtp.sums)


def reference_logprobs(
    built: BuiltModel,
    packs: Sequence[list[int]],
    make_pack: Callable[[list[int]], TokenBatch],
    context: ParallelContext,
    progress: Callable[[int], None] = lambda done: None,
) -> Tensor:
    """fp64 [N] on the CPU, the same on every rank: log-probability of the trained tokens of each document, summed.

    packs: numbers of the documents of each pack, every document 0..N-1 once, the same list on every rank;
    `make_pack` gives a batch that begins with them, in this order. Weights and router counts are left as they are.
    Collective over all ranks.
    """
    sums_N = torch.zeros(sum(map(len, packs)), dtype=torch.float64, device=context.device)
    trunk = BuiltModel(built.trunk, None)
    was_training = built.trunk.training
    built.trunk.eval()
    # Expert-parallel ranks work together on every forward: a rank without a pack repeats the last one.
    for first in range(0, len(packs), context.dp):
        mine = first + context.dp_rank
        documents = packs[min(mine, len(packs) - 1)]
        batch = make_pack(documents).to(context.device)
        logprobs_T = score_batch(trunk, batch, context).logprobs_T
        rows_N = document_sums(logprobs_T, batch.shift(0).valid_T, batch.layout)
        if mine < len(packs):
            sums_N[documents] = rows_N[: len(documents)]
        progress(min(first + context.dp, len(packs)))
    built.trunk.train(was_training)
    if context.dp > 1:
        dist.all_reduce(sums_N, group=context.dp_group)
    return sums_N.cpu()
