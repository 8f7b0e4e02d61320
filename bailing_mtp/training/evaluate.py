"""Losses on held-out documents, with everything that training changes left as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from bailing_mtp.contracts.batch import TokenBatch
from bailing_mtp.training.objective import Objective
from bailing_mtp.training.state import TrainState


class HeldOut(Protocol):
    """A loader of this rank's share of the held-out microbatches, which can be rewound."""

    def next_step(self) -> list[TokenBatch]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def evaluate(state: TrainState, held_out: HeldOut, objective: Objective, n_steps: int) -> dict[str, float]:
    """Means over the next `n_steps` steps' worth of `held_out`, the same on every rank, under valid/ names; a metric
    without a site is left out.

    Without gradients and in eval mode, so router counts, expert bias and weights stay as they are. The loader is
    rewound, so every call sees the same batches. Collective over all ranks.
    """
    start = held_out.state_dict()
    totals: dict[str, float] = {}
    counts: dict[str, float] = {}
    with _eval_mode(state):
        for _ in range(n_steps):
            step_sums, step_counts = _one_step(state, held_out.next_step(), objective)
            _add(totals, step_sums)
            _add(counts, step_counts)
    held_out.load_state_dict(start)
    known = {**counts, **totals}
    names = objective.denominators().items()
    return {valid_name(name): totals[name] / known[per] for name, per in names if known[per]}


def valid_name(name: str) -> str:
    """train/lm_loss -> valid/lm_loss, mtp/loss_depth1 -> valid/mtp_loss_depth1."""
    section, _, rest = name.partition("/")
    return f"valid/{rest}" if section == "train" else f"valid/{section}_{rest}"


def _one_step(
    state: TrainState, microbatches: list[TokenBatch], objective: Objective
) -> tuple[dict[str, float], dict[str, float]]:
    """Sums and counts of one step's microbatches over all data-parallel ranks."""
    local: dict[str, float] = {}
    for batch in microbatches:
        _add(local, objective.count(batch))
    counts = dict(zip(local, state.context.sum_over_dp(list(local.values())), strict=True))
    sums: dict[str, Tensor] = {}
    for batch in microbatches:
        batch = batch.padded_to(state.trunk_module.token_multiple).to(state.context.device)
        _add(sums, objective(state, batch, counts).sums)
    return dict(zip(sums, state.context.sum_over_dp(list(sums.values())), strict=True)), counts


def _add(totals: dict[str, Any], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        totals[name] = totals[name] + value if name in totals else value


@contextlib.contextmanager
def _eval_mode(state: TrainState) -> Iterator[None]:
    for chunk in state.chunks:
        chunk.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for chunk in state.chunks:
            chunk.train()
