"""The one training step of all recipes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bailing_mtp.contracts.batch import TokenBatch
from bailing_mtp.training.main_grads import begin_gradients, clear_untouched
from bailing_mtp.training.objective import Objective
from bailing_mtp.training.state import TrainState
from bailing_mtp.training.update import TRUNK, TrainingDiverged, clip_and_step, finish_gradients, router_bias_kept

OFFLOAD_S = "time/offload_s"


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did, the same on every rank but for times and memory."""

    metrics: dict[str, float]
    """Means over the step's sites (none where it has no such site), the total loss, gradient norms, learning rate,
    cost of offloading."""
    counts: dict[str, float]
    """Sites by count name, and `tokens` and `padding_tokens`, over all ranks and microbatches."""


def train_step(state: TrainState, microbatches: Sequence[TokenBatch], objective: Objective) -> StepResult:
    """Forward and backward over this rank's microbatches, gradient reduction, one optimizer step.

    Every rank of the data-parallel group must bring the same number of microbatches, on the CPU or its device.
    Raises TrainingDiverged on every rank, with the weights untouched, when a loss or gradient is not finite; it
    names the step, the parameter group and the documents of the microbatches concerned.
    """
    gathered = accumulate_gradients(state, microbatches, objective)
    metrics = _means(state, objective, gathered)
    try:
        _require_finite_losses(metrics)
        with router_bias_kept(state):
            finish_gradients(state)
            state.scheduler.step(1)
            norms = clip_and_step(state, state.clip_norm)
    except TrainingDiverged as error:
        raise TrainingDiverged(_report(state, microbatches, gathered, str(error))) from None
    state.step += 1
    state.clock.trained += 1
    metrics |= {"train/grad_norm": norms[TRUNK], "train/lr": _learning_rate(state)}
    metrics |= {f"{group}/grad_norm": norm for group, norm in norms.items() if group != TRUNK}
    if state.offload is not None:
        metrics[OFFLOAD_S] = state.offload.take_seconds()
        metrics["memory/offloaded_gb"] = state.offload.host_bytes / 2**30
    return StepResult(metrics, gathered.counts)


@dataclass(frozen=True)
class Accumulated:
    """What the backward passes of one step left behind, besides gradients."""

    counts: dict[str, float]
    sums: dict[str, Tensor]
    """This rank's undivided sums, by metric name."""
    total: Tensor
    """This rank's share of the step's loss."""
    finite: list[bool]
    """Per microbatch of this rank: whether its loss was finite."""


def accumulate_gradients(
    state: TrainState, microbatches: Sequence[TokenBatch], objective: Objective
) -> Accumulated:
    """Sum the gradients of all microbatches, in place of older ones; the last backward starts their reduction."""
    counts = _global_counts(state, microbatches, objective)
    sums: dict[str, Tensor] = {}
    totals: list[Tensor] = []
    begin_gradients(state.chunks)
    state.optimizer.zero_grad()
    multiple = state.trunk_module.token_multiple
    on_device = [batch.padded_to(multiple).to(state.context.device) for batch in microbatches]
    for index, batch in enumerate(on_device):
        with _gradients_stay_local(state, index + 1 < len(microbatches)):
            terms = objective(state, batch, counts)
            terms.total.backward()
        totals.append(terms.total.detach())
        for name, value in terms.sums.items():
            sums[name] = sums[name] + value if name in sums else value
    clear_untouched(state.chunks)
    stacked = torch.stack(totals)
    return Accumulated(counts, sums, stacked.sum(), torch.isfinite(stacked).tolist())


def _global_counts(
    state: TrainState, microbatches: Sequence[TokenBatch], objective: Objective
) -> dict[str, float]:
    local: dict[str, int] = {"tokens": 0, "padding_tokens": 0}
    for batch in microbatches:
        for name, n_sites in objective.count(batch).items():
            local[name] = local.get(name, 0) + n_sites
        local["tokens"] += batch.layout.n_tokens
        local["padding_tokens"] += batch.layout.n_padding_tokens
    return dict(zip(local, state.context.sum_over_dp(list(local.values())), strict=True))


@contextlib.contextmanager
def _gradients_stay_local(state: TrainState, active: bool) -> Iterator[None]:
    """While active, backward only adds to the gradient buffers and starts no reduction."""
    with contextlib.ExitStack() as stack:
        if active:
            for chunk in state.chunks:
                stack.enter_context(chunk.no_sync())
        yield


def _require_finite_losses(metrics: dict[str, float]) -> None:
    bad = [name for name, value in metrics.items() if not math.isfinite(value)]
    if bad:
        raise TrainingDiverged(f"{', '.join(bad)} is not finite")


def _report(
    state: TrainState, microbatches: Sequence[TokenBatch], gathered: Accumulated, what: str
) -> str:
    """The same message on every rank: what, when, and which documents. Every rank calls it."""
    suspects = [batch for batch, finite in zip(microbatches, gathered.finite, strict=True) if not finite]
    # A finite loss can still have a gradient that is not: then every microbatch of the step is suspect.
    concerned = [name for batch in suspects or microbatches for name in _documents(batch)]
    everyone: list[tuple[bool, list[str]]] = [(False, [])] * state.context.world_size
    dist.all_gather_object(everyone, (bool(suspects), concerned))
    found = any(is_suspect for is_suspect, _ in everyone)
    names = dict.fromkeys(name for is_suspect, names in everyone if is_suspect == found for name in names)
    shown = ", ".join(list(names)[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return f"step {state.step + 1}: {what}; documents: {shown or 'unnamed'}; weights are those of step {state.step}"


def _documents(batch: TokenBatch) -> list[str]:
    real = zip(batch.document_ids, batch.layout.is_padding, strict=False)
    return [name for name, is_padding in real if not is_padding]


def _means(state: TrainState, objective: Objective, gathered: Accumulated) -> dict[str, float]:
    names = list(gathered.sums)
    summed = state.context.sum_over_dp([*gathered.sums.values(), gathered.total])
    by_name = dict(zip(names, summed[:-1], strict=True))
    divisors = gathered.counts | by_name
    # A mean over no site is none: as 0 it would read as a perfect loss.
    means = {
        name: by_name[name] / divisors[divisor]
        for name, divisor in objective.denominators().items()
        if divisors[divisor]
    }
    return {"train/loss": summed[-1], **means}


def _learning_rate(state: TrainState) -> float:
    return max(float(group["lr"]) for group in state.optimizer.param_groups)
