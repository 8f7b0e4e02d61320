"""Acceptance of drafts as a forward pass over a rollout's own samples predicts it, beside what was measured.

Acceptance by depth is compared. The accept length is not: a measured one also counts the steps that the end of a
response cuts short, which weigh more the shorter responses are.
"""

import math
from collections.abc import Sequence

from bailing_mtp.config import GrpoConfig, SamplingConfig
from bailing_mtp.contracts.samples import RolloutGroup, Sample
from bailing_mtp.model.build import BuiltModel
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.rl.samples import PolicyRow, make_policy_batch, usable
from bailing_mtp.rollout.stats import RolloutStats
from bailing_mtp.training.acceptance import Estimates, document_estimates, draft_chain, merged

from .acceptance import joined

PARTED = 0.05
"""Difference of predicted and measured acceptance that is worth a warning, if it is not chance."""
STANDARD_ERRORS = 4.0
FALL = 0.1
"""Share of its best accept length that a run may lose before it says so."""


def can_predict(sampling: SamplingConfig) -> bool:
    """Whether a temperature is all that stands between logits and the distribution that was sampled."""
    cuts = (sampling.top_k, sampling.suppress_token_ids, sampling.min_new_tokens)
    return not any(cuts) and sampling.top_p == 1.0


def predict(
    config: GrpoConfig, built: BuiltModel, groups: Sequence[RolloutGroup], context: ParallelContext
) -> Estimates:
    """Estimates for rollout.speculative_tokens drafts from one microbatch of samples on each data-parallel rank.

    The weights must be those that drew the samples. Collective; the same on every rank.
    """
    samples = [sample for group in groups for sample in usable(group)]
    # First samples of all prompts before second ones: a microbatch that holds few has many prompts.
    samples.sort(key=lambda sample: sample.sample_index)
    if not samples:
        return {}
    mine = _first_of(samples[context.dp_rank :: context.dp], config.train.microbatch_tokens)
    # A rank without samples takes part in the forward all the same.
    rows = [PolicyRow(sample, 0.0) for sample in mine or samples[:1]]
    drafts = config.rollout.speculative_tokens
    modes = [(module, module.training) for module in built.modules]
    for module in built.modules:
        module.eval()
    heads = draft_chain(built, make_policy_batch(rows), context, config.sampling.temperature, drafts)
    for module, was_training in modes:
        module.train(was_training)
    found, begin = [], 0
    for row in rows[: len(mine)]:
        end = begin + row.n_tokens
        found.append(document_estimates(heads, begin, end, begin + len(row.sample.prompt_ids) - 1))
        begin = end
    return joined(merged(found), context)


def predicted_metrics(estimates: Estimates, drafts: int) -> dict[str, float]:
    """Accept length and acceptance by depth."""
    names = {"predicted/accept_length": f"accept_length_k{drafts}"}
    names |= {f"predicted/accept_depth{depth}": f"alpha_{depth}_k{drafts}" for depth in range(1, drafts + 1)}
    values = {name: estimates[key].value for name, key in names.items() if key in estimates}
    return {name: value for name, value in values.items() if math.isfinite(value)}


def parted(estimates: Estimates, stats: RolloutStats) -> list[str]:
    """A line for each depth at which rollout and forward pass disagree, beyond chance."""
    lines = []
    for depth, (accepted, reached) in enumerate(zip(stats.accepted, stats.reached, strict=True), start=1):
        ratio = estimates.get(f"alpha_{depth}_k{stats.depths}")
        if ratio is None or not reached or not math.isfinite(ratio.standard_error):
            continue
        measured = accepted / reached
        spread = math.hypot(ratio.standard_error, math.sqrt(measured * (1 - measured) / reached))
        if abs(measured - ratio.value) > max(PARTED, STANDARD_ERRORS * spread):
            lines.append(
                f"the rollout accepted {measured:.3f} of its drafts at depth {depth}, and a forward pass over its "
                f"samples predicts {ratio.value:.3f}: rollout and trainer compute the MTP layer differently"
            )
    return lines


class FallAlarm:
    """Says when the accept length has fallen by `FALL` of the best so far."""

    def __init__(self) -> None:
        self._best = (0.0, 1)

    def check(self, stats: RolloutStats) -> str | None:
        """Take a rollout's counts; a line if its accept length is far below the best, beyond chance."""
        if not stats.row_steps:
            return None
        (best, n_best), n = self._best, stats.row_steps
        length = stats.step_tokens / n
        # A step keeps 1 to depths + 1 tokens, so its standard deviation is depths / 2 at most.
        spread = stats.depths / 2 * math.sqrt(1 / n + 1 / n_best)
        has_fallen = best - length > max(FALL * best, STANDARD_ERRORS * spread)
        # After a warning not again before it falls as much again.
        if has_fallen or length > best:
            self._best = (length, n)
        return f"accept length fell to {length:.3f} from {best:.3f}" if has_fallen else None


def _first_of(samples: Sequence[Sample], most_tokens: int) -> list[Sample]:
    kept, total = [], 0
    for sample in samples:
        total += len(sample.prompt_ids) + len(sample.response_ids)
        if total > most_tokens:
            break
        kept.append(sample)
    return kept
