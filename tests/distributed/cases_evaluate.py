"""Evaluation shared by data-parallel ranks gives what one process computes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bailing_mtp.contracts.batch import TokenBatch
from bailing_mtp.training.evaluate import evaluate, valid_name
from bailing_mtp.training.state import build_state
from tests.distributed import worlds


class _Held:
    """The reference's microbatches as two held-out steps, this rank's share of each."""

    def __init__(self, dp_rank: int, dp: int) -> None:
        batches = worlds.microbatches()
        self._steps = [batches[:2][dp_rank::dp], batches[2:][dp_rank::dp]]
        self._next = 0

    def next_step(self) -> list[TokenBatch]:
        self._next += 1
        return self._steps[self._next - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._next = state["next"]


def evaluation(reference: worlds.Reference, scratch: Path, tp: int, ep: int) -> None:
    """Before any update, evaluation on the training batches equals the first training step's report."""
    with worlds.layout(tp, ep) as context:
        state = build_state(worlds.fixture_model("moe", context), context, worlds.OPTIM, 10)
        held = _Held(context.dp_rank, context.dp)
        for _ in range(2):
            valid = evaluate(state, held, worlds.OBJECTIVE, n_steps=2)
            names = list(worlds.OBJECTIVE.denominators())
            ours = torch.tensor([valid[valid_name(name)] for name in names])
            theirs = torch.tensor([reference.metrics[0][name] for name in names])
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
