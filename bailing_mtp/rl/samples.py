"""From rollout samples and advantages to the microbatches of every data-parallel rank.

Shapes: T tokens of a pack, L expert layers of the trunk, k experts per token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bailing_mtp.contracts.batch import PackedLayout
from bailing_mtp.contracts.policy import PolicyBatch
from bailing_mtp.contracts.samples import RolloutGroup, Sample
from bailing_mtp.errors import UserError
from bailing_mtp.rl.advantages import Advantages

# A pack of nothing else: one site, so that every layer has a document to look at.
_EMPTY_TOKENS = 2


@dataclass(frozen=True)
class PolicyRow:
    """One sample that is trained, with its advantage."""

    sample: Sample
    advantage: float

    @property
    def n_tokens(self) -> int:
        return len(self.sample.prompt_ids) + len(self.sample.response_ids)

    @property
    def name(self) -> str:
        return f"prompt {self.sample.prompt_index} sample {self.sample.sample_index}"


@dataclass(frozen=True)
class PolicyRows:
    """The samples that are trained, and how many were left out, by reason."""

    rows: tuple[PolicyRow, ...]
    left_out: dict[str, int]


def usable(group: RolloutGroup) -> tuple[Sample, ...]:
    """Samples that may be rewarded and trained: neither cancelled nor failed nor empty."""
    return tuple(s for s in group.samples if s.finish_reason in ("stop", "length") and s.response_ids)


def reward_samples(group: RolloutGroup, decode: Callable[[Sequence[int]], str]) -> list[dict[str, Any]]:
    """What a reward function is given for each usable sample of a group, in order."""
    record = dict(group.prompt.record or {})
    prompt = decode(group.prompt.prompt_ids)
    return [
        {"prompt": prompt, "response": decode(s.response_ids), "answer": record.get("answer"), "record": record}
        for s in usable(group)
    ]


def policy_rows(groups: Sequence[RolloutGroup], found: Advantages) -> PolicyRows:
    """Pair the usable samples of every group with its advantages, which are in the order of `usable`."""
    rows: list[PolicyRow] = []
    left_out: Counter[str] = Counter()
    for group, values in zip(groups, found.groups, strict=True):
        samples = usable(group)
        left_out["unusable"] += len(group.samples) - len(samples)
        if values is None:
            left_out["equal_rewards"] += len(samples)
            continue
        rows += [PolicyRow(sample, value) for sample, value in zip(samples, values, strict=True)]
    return PolicyRows(tuple(rows), dict(left_out))


def pack_rows(
    rows: Sequence[PolicyRow], microbatch_tokens: int, dp: int, n_microbatches: int = 1
) -> list[list[PolicyBatch]]:
    """Microbatches of each data-parallel rank: as few as hold the rows, the same number on every rank, at least
    `n_microbatches`, with the longest as short as balancing makes it.

    The result depends on the rows alone. Raises UserError for a row longer than `microbatch_tokens`.
    """
    for row in rows:
        if row.n_tokens > microbatch_tokens:
            raise UserError(
                f"train.microbatch_tokens: {microbatch_tokens} cannot hold {row.name} of {row.n_tokens} tokens; "
                "use more, or a smaller sampling.max_new_tokens"
            )
    total = sum(row.n_tokens for row in rows)
    per_rank = max(n_microbatches, -(-total // (microbatch_tokens * dp)))
    bins = None
    while bins is None:
        bins = balanced([row.n_tokens for row in rows], per_rank * dp, microbatch_tokens)
        per_rank += 1
    # Bins are sorted by load, so that ranks meet packs of like size at the same time.
    bins.sort(key=lambda members: -sum(rows[index].n_tokens for index in members))
    return [[make_policy_batch([rows[i] for i in sorted(b)]) for b in bins[rank::dp]] for rank in range(dp)]


def balanced(lengths: Sequence[int], n_bins: int, capacity: int) -> list[list[int]] | None:
    """Indices dealt to `n_bins` bins, longest first, each to the emptiest; None where that overflows `capacity`."""
    bins: list[list[int]] = [[] for _ in range(n_bins)]
    loads = [0] * n_bins
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        emptiest = min(range(n_bins), key=lambda b: loads[b])
        loads[emptiest] += lengths[index]
        bins[emptiest].append(index)
        if loads[emptiest] > capacity:
            return None
    return bins


def make_policy_batch(rows: Sequence[PolicyRow]) -> PolicyBatch:
    """One pack, a document per row; without rows a short pack of padding.

    Raises ValueError for a sample drawn greedily, which has no density to take a ratio to, and where some samples
    lack routes that others have.
    """
    if not rows:
        zeros = torch.zeros(_EMPTY_TOKENS)
        layout = PackedLayout.build([_EMPTY_TOKENS], [True])
        return PolicyBatch(zeros.long(), zeros.bool(), layout, (), None, zeros, zeros)
    ids, mask, advantage, logprob = [], [], [], []
    for row in rows:
        n_prompt, n_response = len(row.sample.prompt_ids), len(row.sample.response_ids)
        ids += [*row.sample.prompt_ids, *row.sample.response_ids]
        mask += [False] * n_prompt + [True] * n_response
        advantage += [0.0] * n_prompt + [row.advantage] * n_response
        logprob += [0.0] * n_prompt + tempered_logprobs(row.sample)
    return PolicyBatch(
        input_ids_T=torch.tensor(ids, dtype=torch.int64),
        loss_mask_T=torch.tensor(mask, dtype=torch.bool),
        layout=PackedLayout.build([row.n_tokens for row in rows]),
        document_ids=tuple(row.name for row in rows),
        advantage_T=torch.tensor(advantage, dtype=torch.float32),
        rollout_logprob_T=torch.tensor(logprob, dtype=torch.float32),
        routes_TLk=_routes(rows),
    )


def _routes(rows: Sequence[PolicyRow]) -> torch.Tensor | None:
    """int16 [T, L, k], -1 on the last token of a row whose rollout never fed it; None if nothing was recorded."""
    if all(row.sample.routes is None for row in rows):
        return None
    parts = []
    for row in rows:
        recorded, n_tokens = row.sample.routes, row.n_tokens
        if recorded is None or not n_tokens - 1 <= len(recorded) <= n_tokens:
            n_recorded = 0 if recorded is None else len(recorded)
            raise ValueError(f"{row.name}: has routes of {n_recorded} of its {n_tokens} tokens")
        part_TLk = torch.full((n_tokens, *recorded.shape[1:]), -1, dtype=torch.int16)
        part_TLk[: len(recorded)] = torch.from_numpy(recorded)
        parts.append(part_TLk)
    return torch.cat(parts)


def tempered_logprobs(sample: Sample) -> list[float]:
    """log softmax(logits / temperature) at each response token: processed log-probability + kept log-mass."""
    if sample.kept_logmass is None:
        raise ValueError(f"prompt {sample.prompt_index}: sampled at temperature 0, which policy losses cannot train")
    return [p + kept for p, kept in zip(sample.processed_logprobs, sample.kept_logmass, strict=True)]
