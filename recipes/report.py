"""What a run tells: the live line, the metrics of its log points, the closing summary with charts."""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from bailing_mtp.config import RunConfig
from bailing_mtp.contracts.batch import TokenBatch
from bailing_mtp.log import ProgressLine, duration
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.training.flops import TrainingFlops, peak_flops_per_s
from bailing_mtp.training.metrics import Throughput, read_metrics

from .charts import Run, write_charts
from .memory import MemoryWatch
from .sinks import Sinks

# Label and beginning of the metrics' names on the live line.
LIVE = (
    ("lm", "train/lm_loss"), ("dpo", "dpo/loss"), ("right", "dpo/accuracy"), ("mtp", "mtp/loss_depth"),
    ("accept", "mtp/accept_depth"), ("reward", "reward/mean"), ("accept length", "rollout/accept_length"),
)  # fmt: skip
HELD_OUT = ("valid/lm_loss", "valid/dpo_loss", "valid/reward_mean")
# What the summary's table leaves out: settings, and rates, whose mean its first line gives.
NOT_IN_TABLE = re.compile(r"train/(lr|mfu|\w+_per_second)|(time|memory)/.*")


class Report:
    """One per rank and run; only the writing rank prints and writes. `log` is collective."""

    def __init__(
        self,
        config: RunConfig,
        verb: str,
        context: ParallelContext,
        memory: MemoryWatch,
        flops: TrainingFlops,
        steps: int,
        first_step: int = 0,
    ) -> None:
        self._run_dir = Path(config.run_dir)
        self._context, self._memory, self._flops = context, memory, flops
        self._steps, self._first_step = steps, first_step
        self._sinks = Sinks(config, verb, first_step) if context.is_writer else None
        self._line = ProgressLine(sys.stderr if context.is_writer else None)
        self.pace = Throughput(steps, first_step)
        self._interval_flops = self._all_flops = self._all_tokens = 0.0
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._notes: dict[str, float] = {}

    def add(self, microbatches: Sequence[TokenBatch], tokens: float) -> None:
        """Count one finished step: this rank's microbatches, and the tokens of all ranks (padding included)."""
        self.pace.add(tokens)
        self._all_tokens += tokens
        self._interval_flops += self._flops.of(microbatches)

    def note(self, values: Mapping[str, float]) -> None:
        """Facts of the run's start, written once, with the next log point."""
        self._notes |= values

    def start(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write what is known before the first step, if anything is."""
        self._first = {**metrics, **self._first}
        if metrics and self._sinks is not None:
            self._sinks.write(step, dict(metrics))
            self._line.show(self._live(step, metrics), final=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a log point and show the live line."""
        values = {**metrics, **self._speed(), **self._notes}
        self._notes = {}
        self._first = {**values, **self._first}
        self._last = {**self._last, **values}
        if self._sinks is not None:
            self._sinks.write(step, values)
        self._line.show(self._live(step, values), final=step == self._steps)
        self._memory.tell(step - self._first_step, step == self._steps)

    def close(self, is_finished: bool = True) -> None:
        """End the files; of a finished run draw the charts and print the summary."""
        if self._sinks is None:
            return
        self._sinks.close()
        if not is_finished:
            self._line.end()
            return
        rows = read_metrics(self._sinks.metrics_path)
        charts = write_charts([Run(self._run_dir.name, rows)], self._run_dir / "charts")
        print(f"trained {self._steps - self._first_step} steps, {self._mean_speed()}")
        print(f"  {'metric':<24} {'first':>9} -> last")
        for name, last in self._last.items():
            if not NOT_IN_TABLE.fullmatch(name):
                print(f"  {name:<24} {_number(self._first[name]):>9} -> {_number(last)}")
        if charts:
            print(f"charts: {self._run_dir / 'charts'}/{{{','.join(file.stem for file in charts)}}}.png")
        print("\n".join(self._sinks.where()), flush=True)

    def _speed(self) -> dict[str, float]:
        interval = self.pace.read()
        (flops,) = self._context.sum_over_dp([self._interval_flops])
        self._all_flops += flops
        self._interval_flops = 0.0
        # Per device: tensor-parallel ranks share the work of their data-parallel rank.
        flops_per_s = flops / interval.seconds / self._context.world_size
        speed = {
            "train/tokens_per_second": interval.tokens / interval.seconds,
            "train/model_tflops_per_second": flops_per_s / 1e12,
        }
        peak = _peak(self._context.device)
        if peak is not None:
            speed["train/mfu"] = flops_per_s / peak
        return speed | self._memory.metrics()

    def _mean_speed(self) -> str:
        seconds = self.pace.trained_s()
        flops_per_s = self._all_flops / seconds / self._context.world_size
        peak = _peak(self._context.device)
        used = f", {flops_per_s / peak:.1%} of its peak" if peak else ""
        return (
            f"{self._all_tokens:,.0f} tokens in {duration(self.pace.elapsed_s())}: "
            f"{self._all_tokens / seconds:,.0f} tokens/s, {flops_per_s / 1e12:.3g} model TFLOP/s a device{used}"
        )

    def _live(self, step: int, values: Mapping[str, float]) -> str:
        parts = [f"step {step}/{self._steps}"]
        for label, prefix in LIVE:
            found = [f"{value:.3f}" for name, value in values.items() if name.startswith(prefix)]
            if found:
                parts.append(f"{label} {' '.join(found)}")
        parts += [f"held out {values[name]:.3f}" for name in HELD_OUT if name in values]
        if self._all_tokens:
            parts += [f"{self._all_tokens / self.pace.trained_s():,.0f} tokens/s", f"{self.pace.left(step)} left"]
        return "  ".join(parts)


def _peak(device: torch.device) -> float | None:
    return peak_flops_per_s(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"
