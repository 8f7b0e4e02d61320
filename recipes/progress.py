"""What a grpo run shows and keeps: live line, log points, warnings, samples, checkpoints."""

import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from bailing_mtp.config import GrpoConfig
from bailing_mtp.contracts.policy import PolicyBatch
from bailing_mtp.contracts.samples import RolloutGroup
from bailing_mtp.data.prompts import PromptLoader
from bailing_mtp.data.tokenizer import Tokenizer
from bailing_mtp.log import ProgressLine
from bailing_mtp.rollout.engine import RolloutEngine
from bailing_mtp.rollout.stats import RolloutStats
from bailing_mtp.training.flops import training_flops
from bailing_mtp.training.step import StepResult

from .checkpoints import RunCheckpoints, tell_fresh_mtp
from .policy import Policy
from .predicted import FallAlarm, can_predict, parted, predict, predicted_metrics
from .report import Report
from .rollouts import Rollouts
from .session import Source

OF_THE_START = ("rollout/logprob_gap", "rollout/route_agreement")
"""Metrics that mean the weights that rolled out, so the first of several optimizer steps."""


class RunProgress:
    """All ranks make the same calls; `compare`, `log` and `close` are collective."""

    def __init__(
        self, config: GrpoConfig, source: Source, policy: Policy, prompts: PromptLoader, tokenizer: Tokenizer
    ) -> None:
        self._config, self._policy, self._tokenizer = config, policy, tokenizer
        state = policy.state
        self._context = context = state.context
        flops = training_flops(
            source.arch, 0 if config.mtp.loss_scale is None else config.mtp.depth, config.mtp.detach
        )
        self._report = Report(config, "grpo", context, flops, config.train.steps, state.step)
        self._checkpoints = RunCheckpoints(config, source, state, prompts, config.train.steps)
        self._predicted: dict[str, float] = {}
        self._alarm = FallAlarm()
        if source.fresh_mtp:
            tell_fresh_mtp(config, source, context, self._report)
        if context.is_writer:
            notes = [f"{prompts.n_too_long:,} left out, too long for data.seq_tokens"] if prompts.n_too_long else []
            notes += [f"{prompts.n_skipped_lines:,} bad lines skipped"] if prompts.n_skipped_lines else []
            print(", ".join([f"data: {len(prompts):,} prompts from {config.data.path}", *notes]), flush=True)

    def rolling(self) -> AbstractContextManager[None]:
        """Time inside is no training time."""
        return self._report.pace.paused()

    def watch(self, engine: RolloutEngine, rollouts: Rollouts) -> Callable[[RolloutStats], None]:
        """A callback that shows a rollout as it goes on, and notes the memory it holds."""
        line = ProgressLine(sys.stderr if self._context.is_writer else None)
        config, state = self._config, self._policy.state
        total = config.rl.prompts_per_rollout * config.sampling.samples_per_prompt // self._context.dp

        def show(stats: RolloutStats) -> None:
            rollouts.memory_bytes = max(rollouts.memory_bytes, engine.memory_bytes)
            rate = stats.tokens / max(stats.seconds, 1e-9)
            line.show(f"after step {state.step}: rollout {stats.samples}/{total} samples  {rate:,.0f} tokens/s")

        return show

    def compare(self, rollouts: Rollouts, groups: Sequence[RolloutGroup]) -> None:
        """Predict the acceptance of the last rollout, `groups`, with the weights that drew it; warn of surprises."""
        config, stats, step = self._config, rollouts.stats, self._policy.state.step
        self._predicted = {}
        if not config.rollout.speculative_tokens:
            return
        if can_predict(config.sampling):
            estimates = predict(config, self._policy.built, groups, self._context)
            self._predicted = predicted_metrics(estimates, stats.depths)
            for line in parted(estimates, stats):
                self._warn(f"step {step}: {line}")
        fallen = self._alarm.check(stats)
        if fallen is not None:
            hint = "" if config.mtp.loss_scale else "; mtp=detached trains the MTP layer along with the policy"
            self._warn(f"step {step}: {fallen}{hint}")

    def log(
        self, rollouts: Rollouts, minibatches: Sequence[list[PolicyBatch]], results: Sequence[StepResult]
    ) -> None:
        """One log point for the optimizer steps on one rollout; saves if it is time to."""
        step = self._policy.state.step
        for batches, result in zip(minibatches, results, strict=True):
            self._report.add(batches, result.counts["tokens"])
        values = {
            name: first if name in OF_THE_START else statistics.fmean(result.metrics[name] for result in results)
            for name, first in results[0].metrics.items()
        }
        values["policy/ratio_gap"] = abs(results[0].metrics["policy/ratio"] - 1.0)
        saved = self._checkpoints.after_step()
        self._report.log(step, values | rollouts.metrics() | self._predicted | saved)
        if self._context.is_writer and self._config.rl.samples_kept:
            rollouts.keep(Path(self._config.run_dir) / "rollouts" / f"step_{step}.jsonl", self._tokenizer)

    def close(self) -> None:
        """Charts, summary, and how to export."""
        self._report.close()
        self._checkpoints.say_how_to_export()

    def _warn(self, text: str) -> None:
        if self._context.is_writer:
            print(f"warning: {text}", file=sys.stderr, flush=True)
