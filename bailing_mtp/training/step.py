"""The one training step of all recipes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from torch import Tensor

from bailing_mtp.contracts.batch import TokenBatch
from bailing_mtp.training.objective import Objective
from bailing_mtp.training.state import TrainState


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did, the same on every rank."""

    metrics: dict[str, float]
    """Means over the step's sites, the total loss, gradient norms, learning rate."""
    counts: dict[str, float]
    """Sites by count name, and `tokens` and `padding_tokens`, over all ranks and microbatches."""


def train_step(state: TrainState, microbatches: Sequence[TokenBatch], objective: Objective) -> StepResult:
    """Forward and backward over this rank's microbatches, gradient reduction, one optimizer step.

    Every rank of the data-parallel group must bring the same number of microbatches, on the CPU or its device.
    """
    gathered = accumulate_gradients(state, microbatches, objective)
    grad_norm = _update(state)
    metrics = _means(state, objective, gathered)
    metrics |= {"train/grad_norm": grad_norm, "train/lr": _learning_rate(state)}
    mtp_norm = state.optimizer.grad_norms_by_group.get("mtp")
    if mtp_norm is not None:
        metrics["mtp/grad_norm"] = float(mtp_norm)
    return StepResult(metrics, gathered.counts)


@dataclass(frozen=True)
class Accumulated:
    """What the backward passes of one step left behind, besides gradients."""

    counts: dict[str, float]
    sums: dict[str, Tensor]
    """This rank's undivided sums, by metric name."""
    total: Tensor
    """This rank's share of the step's loss."""


def accumulate_gradients(
    state: TrainState, microbatches: Sequence[TokenBatch], objective: Objective
) -> Accumulated:
    """Clear the gradients, then add those of all microbatches; the last backward starts their reduction."""
    counts = _global_counts(state, microbatches, objective)
    sums: dict[str, Tensor] = {}
    total = torch.zeros((), device=state.context.device)
    for chunk in state.chunks:
        chunk.zero_grad_buffer()
    state.optimizer.zero_grad()
    for index, batch in enumerate(microbatches):
        batch = batch.padded_to(state.context.tp).to(state.context.device)
        with _gradients_stay_local(state, index + 1 < len(microbatches)):
            terms = objective(state, batch, counts)
            terms.total.backward()
        total = total + terms.total.detach()
        for name, value in terms.sums.items():
            sums[name] = sums[name] + value if name in sums else value
    return Accumulated(counts, sums, total)


def _global_counts(
    state: TrainState, microbatches: Sequence[TokenBatch], objective: Objective
) -> dict[str, float]:
    local: dict[str, int] = {"tokens": 0, "padding_tokens": 0}
    for batch in microbatches:
        for name, n_sites in objective.count(batch).items():
            local[name] = local.get(name, 0) + n_sites
        local["tokens"] += batch.layout.n_tokens
        local["padding_tokens"] += sum(n for n, pad in zip(batch.layout.lengths, batch.layout.is_padding) if pad)
    return dict(zip(local, state.context.sum_over_dp(list(local.values())), strict=True))


@contextlib.contextmanager
def _gradients_stay_local(state: TrainState, active: bool) -> Iterator[None]:
    """While active, backward only adds to the gradient buffers and starts no reduction."""
    with contextlib.ExitStack() as stack:
        if active:
            for chunk in state.chunks:
                stack.enter_context(chunk.no_sync())
        yield


def _update(state: TrainState) -> float:
    """Finish the gradients (data-parallel and tensor-parallel sums, expert bias), clip, step; returns the norm."""
    state.scheduler.step(1)
    with state.context.megatron_scope():
        finalize_model_grads(state.chunks, None, pg_collection=state.context.groups)
        _, grad_norm, _ = state.optimizer.step()
    state.step += 1
    return float(grad_norm)


def _means(state: TrainState, objective: Objective, gathered: Accumulated) -> dict[str, float]:
    names = list(gathered.sums)
    summed = state.context.sum_over_dp([*gathered.sums.values(), gathered.total])
    divisors = objective.denominators()
    means = {
        name: value / max(1.0, gathered.counts[divisors[name]])
        for name, value in zip(names, summed[:-1], strict=True)
    }
    return {"train/loss": summed[-1], **means}


def _learning_rate(state: TrainState) -> float:
    return max(float(group["lr"]) for group in state.optimizer.param_groups)
