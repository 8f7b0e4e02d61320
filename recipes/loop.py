"""The training loop that recipes share: steps, the live line, metrics.jsonl, the closing summary."""

import sys
from typing import Protocol

from bailing_mtp.config import TrainConfig
from bailing_mtp.contracts.batch import TokenBatch
from bailing_mtp.log import ProgressLine, duration
from bailing_mtp.training.metrics import MetricsFile, Throughput
from bailing_mtp.training.objective import Objective
from bailing_mtp.training.state import TrainState
from bailing_mtp.training.step import train_step


class Batches(Protocol):
    def next_step(self) -> list[TokenBatch]:
        """This rank's microbatches of the next step."""
        ...


def train(
    state: TrainState, batches: Batches, objective: Objective, plan: TrainConfig, metrics: MetricsFile | None
) -> None:
    """Train until `plan.steps`; only the rank with a metrics file prints."""
    line = ProgressLine(sys.stderr if metrics is not None else None)
    pace = Throughput(plan.steps, state.step)
    first: dict[str, float] = {}
    values: dict[str, float] = {}
    while state.step < plan.steps:
        result = train_step(state, batches.next_step(), objective)
        pace.add(result.counts["tokens"])
        last = state.step == plan.steps
        if state.step % plan.log_every and not last:
            continue
        values = {**result.metrics, "train/tokens_per_second": pace.read()}
        first = first or values
        if metrics is not None:
            metrics.write(state.step, values)
        line.show(_live(state.step, plan.steps, values, pace), final=last)
    if metrics is not None:
        metrics.close()
        print(_summary(plan.steps, first, values, pace), flush=True)


def _live(step: int, steps: int, values: dict[str, float], pace: Throughput) -> str:
    losses = " ".join(f"{_short(name)} {values[name]:.3f}" for name in values if name in _SHOWN)
    rate = values["train/tokens_per_second"]
    return f"step {step}/{steps}  {losses}  {rate:,.0f} tokens/s  {pace.left(step)} left"


def _summary(steps: int, first: dict[str, float], last: dict[str, float], pace: Throughput) -> str:
    lines = [f"trained {steps} steps in {duration(pace.elapsed_s())}"]
    lines += [
        f"  {name}: {first[name]:.3f} -> {last[name]:.3f}"
        for name in last
        if name in _SHOWN or name in _QUALITY
    ]
    return "\n".join(lines)


_SHOWN = ("train/lm_loss", "mtp/loss_depth1", "train/grad_norm")
_QUALITY = ("train/accuracy", "mtp/accuracy_depth1")


def _short(name: str) -> str:
    return name.partition("/")[2].replace("_", " ")
