"""What a grpo run shows and keeps: live line, log points, warnings, samples, checkpoints."""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from bailing_mtp.config import GrpoConfig
from bailing_mtp.contracts.policy import PolicyBatch
from bailing_mtp.contracts.samples import RolloutGroup
from bailing_mtp.data.prompts import PromptLoader
from bailing_mtp.log import ProgressLine
from bailing_mtp.rollout.engine import RolloutEngine
from bailing_mtp.rollout.stats import RolloutStats
from bailing_mtp.training.flops import training_flops
from bailing_mtp.training.step import OFFLOAD_S, StepResult

from .backlog import Backlog
from .checkpoints import RunCheckpoints, tell_fresh_mtp
from .heldout import HeldOut
from .policy import Policy
from .policy_prompts import Prompts, write_prompts
from .predicted import FallAlarm, can_predict, parted, predict, predicted_metrics
from .report import Report
from .rollouts import Rollouts
from .session import Source
from .stop_signal import StopSignal
from .update import over_steps


class RunProgress:
    """All ranks make the same calls; `compare`, `log` and `close` are collective."""

    def __init__(
        self, config: GrpoConfig, source: Source, policy: Policy, opened: Prompts, backlog: Backlog
    ) -> None:
        self._config, self._policy, self._backlog, self._tokenizer = config, policy, backlog, opened.tokenizer
        state = policy.state
        self._context = context = state.context
        flops = training_flops(
            source.arch, 0 if config.mtp.loss_scale is None else config.mtp.depth, config.mtp.detach
        )
        self._report = Report(config, "grpo", context, policy.memory, flops, config.train.steps, state.step)
        self._checkpoints = RunCheckpoints(config, source, state, backlog, config.train.steps)
        self._predicted: dict[str, float] = {}
        self._alarm = FallAlarm()
        if source.fresh_mtp:
            tell_fresh_mtp(config, source, context, self._report)
        if context.is_writer:
            print(f"data: {_described(opened.train)} from {config.data.path}", flush=True)
            if opened.valid is not None:
                print(f"held out: {_described(opened.valid)} from {config.data.valid_path}", flush=True)
                write_prompts(opened.valid, Path(config.run_dir), opened.tokenizer)

    def start(self, held_out: HeldOut) -> None:
        """Evaluate the policy that the first step will change."""
        step = self._policy.state.step
        if step == 0:
            with self.rolling():
                values = held_out.evaluate(step)
            self._report.start(step, values)

    def rolling(self) -> AbstractContextManager[None]:
        """Time inside is no training time."""
        return self._report.pace.paused()

    def watch(self, engine: RolloutEngine, rollouts: Rollouts) -> Callable[[RolloutStats], None]:
        """A callback that shows a rollout as it goes on, and notes the memory it holds."""
        line = ProgressLine(sys.stderr if self._context.is_writer else None)
        config, state = self._config, self._policy.state
        total = self._backlog.n_under_way * config.sampling.samples_per_prompt // self._context.dp

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
        # Of an over-sampled rollout the groups hold tokens of older weights, and not all that its statistics count.
        if can_predict(config.sampling) and config.rl.oversample == 1:
            estimates = predict(config, self._policy.built, groups, self._context)
            self._predicted = predicted_metrics(estimates, stats.depths)
            for line in parted(estimates, stats):
                self._warn(f"step {step}: {line}")
        fallen = self._alarm.check(stats)
        if fallen is not None:
            hint = "" if config.mtp.loss_scale else "; mtp=detached trains the MTP layer along with the policy"
            self._warn(f"step {step}: {fallen}{hint}")

    def log(
        self,
        rollouts: Rollouts,
        minibatches: Sequence[list[PolicyBatch]],
        results: Sequence[StepResult],
        held_out: HeldOut,
        stop: StopSignal,
    ) -> None:
        """One log point for the optimizer steps on one rollout; evaluates and saves if it is time to. Ends the run if
        asked to."""
        step = self._policy.state.step
        for batches, result in zip(minibatches, results, strict=True):
            self._report.add(batches, result.counts["tokens"])
        values = over_steps([result.metrics for result in results])
        rollouts.switched(sum(result.metrics.get(OFFLOAD_S, 0.0) for result in results))
        values["policy/ratio_gap"] = abs(results[0].metrics["policy/ratio"] - 1.0)
        steps = self._config.train.steps
        stops = stop.agreed() and step < steps
        saved = self._checkpoints.after_step(stops)
        with self.rolling():
            evaluated = {} if stops else held_out.evaluate(step)
        counted = rollouts.metrics() | self._backlog.metrics()
        self._report.log(step, values | counted | self._predicted | saved | evaluated)
        if self._context.is_writer and self._config.rl.samples_kept:
            rollouts.keep(Path(self._config.run_dir) / "rollouts" / f"step_{step}.jsonl", self._tokenizer)
        if stops:
            self._report.close(is_finished=False)
            stop.leave(step, steps)

    def close(self) -> None:
        """Charts, summary, and how to export."""
        self._report.close()
        self._checkpoints.say_how_to_export()

    def _warn(self, text: str) -> None:
        if self._context.is_writer:
            print(f"warning: {text}", file=sys.stderr, flush=True)


def _described(prompts: PromptLoader) -> str:
    """Their number, and what was left out."""
    left_out = {
        "too long for data.seq_tokens": prompts.n_too_long,
        "also in data.path": prompts.n_shared,
        "in bad lines": prompts.n_skipped_lines,
    }
    notes = [f"{n:,} {what} left out" for what, n in left_out.items() if n]
    return f"{len(prompts):,} prompts" + (f" ({', '.join(notes)})" if notes else "")
