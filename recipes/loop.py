"""The training loop that recipes share: steps, log points, evaluation on held-out documents."""

from typing import Protocol

from bailing_mtp.config import TrainConfig
from bailing_mtp.contracts.batch import TokenBatch
from bailing_mtp.training.evaluate import HeldOut, evaluate
from bailing_mtp.training.objective import Objective
from bailing_mtp.training.state import TrainState
from bailing_mtp.training.step import train_step

from .report import Report


class Batches(Protocol):
    def next_step(self) -> list[TokenBatch]:
        """This rank's microbatches of the next step."""
        ...


class Checkpoints(Protocol):
    """Saves a run as it goes on."""

    def after_step(self) -> dict[str, float]:
        """Save if it is time to; metrics of what was saved."""
        ...


def train(
    state: TrainState,
    batches: Batches,
    objective: Objective,
    plan: TrainConfig,
    report: Report,
    held_out: HeldOut | None = None,
    checkpoints: Checkpoints | None = None,
    evaluation: Objective | None = None,
) -> None:
    """Train until `plan.steps`, evaluating on `held_out` every `plan.eval_every` steps and after the last.

    evaluation: what is evaluated, where that is not the objective itself.
    """
    while state.step < plan.steps:
        microbatches = batches.next_step()
        result = train_step(state, microbatches, objective)
        report.add(microbatches, result.counts["tokens"])
        values = dict(result.metrics)
        saved = {} if checkpoints is None else checkpoints.after_step()
        is_last = state.step == plan.steps
        evaluates = held_out is not None and (is_last or state.step % plan.eval_every == 0)
        if evaluates:
            with report.pace.paused():
                values |= evaluate(state, held_out, evaluation or objective, plan.eval_steps)
        if evaluates or saved or is_last or state.step % plan.log_every == 0:
            report.log(state.step, values | saved)
    report.close()
