"""What the controller costs and what it finds: python -m recipes.benchmark what=adaptive

n rows of a step, k drafts of at most K.
"""

from collections.abc import Callable
from dataclasses import dataclass

from bailing_mtp.config import BenchmarkConfig
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.weights.view import WeightsView

from .bench_rollout import WARM_UP_TOKENS, TimedRollouts, Timing

TRIAL_TOKENS = 96
"""Of a first rollout, in which other k are tried and captured."""


@dataclass(frozen=True)
class AdaptiveFigure:
    """A rollout whose k the controller chose, beside those of fixed k."""

    rows: int
    acceptance: str
    plain_ms: float
    """A step of an engine without drafts."""
    own_plain_ms: float | None
    """A step with k=0 under the controller, which refreshes the MTP layer; None where k=0 did not run most."""
    tokens_per_second: float
    """Of all decode steps, trials included."""
    best_drafts: int
    """The fixed k with the most tokens per second; of k=0 under the controller where no draft is kept."""
    best_tokens_per_second: float
    steps_by_drafts: tuple[int, ...]

    @property
    def of_best(self) -> float:
        return self.tokens_per_second / self.best_tokens_per_second


ADAPTIVE_HEADING = (
    f"{'rows':>5} {'kept':>5} {'plain ms':>9} {'k=0 ms':>8} {'of plain':>9} {'tokens/s':>9} {'best k':>7} "
    f"{'tokens/s':>9} {'of best':>8}  steps by k"
)


def adaptive_line(x: AdaptiveFigure) -> str:
    """One line under ADAPTIVE_HEADING."""
    own = "-" if x.own_plain_ms is None else f"{x.own_plain_ms:.3f}"
    share = "-" if x.own_plain_ms is None else f"{x.own_plain_ms / x.plain_ms:.3f}"
    return (
        f"{x.rows:>5} {x.acceptance:>5} {x.plain_ms:>9.3f} {own:>8} {share:>9} {x.tokens_per_second:>9.0f} "
        f"{x.best_drafts:>7} {x.best_tokens_per_second:>9.0f} {x.of_best:>8.3f}  {list(x.steps_by_drafts)}"
    )


def measure_adaptive(
    config: BenchmarkConfig,
    view: WeightsView,
    context: ParallelContext,
    show: Callable[[AdaptiveFigure], None],
) -> list[AdaptiveFigure]:
    """No draft kept, then every draft, at every number of rows. Prompts are short: all rows begin together."""
    figures = []
    for n in config.rows:
        fixed = {k: _run(config, view, context, n, k) for k in config.drafts}
        rates = {k: n * context.dp * (k + 1) / timing.step_ms * 1e3 for k, timing in fixed.items()}
        best = max(rates, key=rates.__getitem__)
        for acceptance in ("none", "all"):
            # Each with a controller that knows nothing yet.
            rollouts = TimedRollouts(
                view, context, n, max(config.drafts), WARM_UP_TOKENS, config.new_tokens, adaptive=True
            )
            timing = rollouts.run(1.0, acceptance, TRIAL_TOKENS)
            ran_most = max(range(len(timing.steps_by_drafts)), key=timing.steps_by_drafts.__getitem__)
            own_ms = timing.step_ms if ran_most == 0 else None
            best_k, best_rate = best, rates[best]
            if acceptance == "none":
                best_k, best_rate = 0, n * context.dp / (own_ms or fixed[0].step_ms) * 1e3
            figure = AdaptiveFigure(
                rows=n,
                acceptance=acceptance,
                plain_ms=fixed[0].step_ms,
                own_plain_ms=own_ms,
                tokens_per_second=timing.step_tokens / timing.rollout_ms * 1e3,
                best_drafts=best_k,
                best_tokens_per_second=best_rate,
                steps_by_drafts=timing.steps_by_drafts,
            )
            show(figure)
            figures.append(figure)
            rollouts.engine.release()
    return figures


def _run(config: BenchmarkConfig, view: WeightsView, context: ParallelContext, n: int, k: int) -> Timing:
    """All drafts kept."""
    rollouts = TimedRollouts(view, context, n, k, WARM_UP_TOKENS, config.new_tokens)
    timing = rollouts.run(1.0, "all" if k else "own")
    rollouts.engine.release()
    return timing
