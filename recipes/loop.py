"""The training loop that recipes share: steps, log points, evaluation on held-out documents."""

from typing import Protocol

from bailing_mtp.config import TrainConfig
from bailing_mtp.contracts.batch import TokenBatch
from bailing_mtp.training.evaluate import HeldOut, evaluate
from bailing_mtp.training.objective import Objective
from bailing_mtp.training.state import TrainState
from bailing_mtp.training.step import train_step

from .report import Report
from .stop_signal import StopSignal


class Batches(Protocol):
    def next_step(self) -> list[TokenBatch]:
        """This rank's microbatches of the next step."""
        ...


class Checkpoints(Protocol):
    """Saves a run as it goes on."""

    def after_step(self, stops: bool = False) -> dict[str, float]:
        """Save if it is time to, or the run stops here; metrics of what was saved."""
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
    A signal to stop ends it after a whole step, saved and logged, with SystemExit(EXIT_STOPPED).
    """
    with StopSignal(state.context) as stop:
        _steps(state, batches, objective, plan, report, held_out, checkpoints, evaluation or objective, stop)
    report.close()


def _steps(
    state: TrainState,
    batches: Batches,
    objective: Objective,
    plan: TrainConfig,
    report: Report,
    held_out: HeldOut | None,
    checkpoints: Checkpoints | None,
    evaluation: Objective,
    stop: StopSignal,
) -> None:
    while state.step < plan.steps:
        microbatches = batches.next_step()
        result = train_step(state, microbatches, objective)
        report.add(microbatches, result.counts["tokens"])
        values = dict(result.metrics)
        is_last = state.step == plan.steps
        stops = stop.agreed() and not is_last
        saved = {} if checkpoints is None else checkpoints.after_step(stops)
        evaluates = held_out is not None and (is_last or state.step % plan.eval_every == 0)
        if evaluates:
            with report.pace.paused():
                values |= evaluate(state, held_out, evaluation, plan.eval_steps)
        if evaluates or saved or is_last or state.step % plan.log_every == 0:
            report.log(state.step, values | saved)
        if stops:
            report.close(is_finished=False)
            stop.leave(state.step, plan.steps)
