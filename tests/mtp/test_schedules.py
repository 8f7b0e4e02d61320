"""The learning rate that each step really uses, against values worked out by hand."""

from __future__ import annotations

import pytest

from bailing_mtp.config import OptimConfig
from bailing_mtp.model.build import build_model
from bailing_mtp.training.state import TrainState, build_state
from bailing_mtp.training.step import train_step
from bailing_mtp.weights.load import load_hf, read_architecture
from bailing_mtp.weights.names import Shard
from tests.distributed import worlds
from tests.mtp import models

COSINE_5 = [0.9045085, 0.6545085, 0.3454915, 0.0954915, 0.0]
"""(1 + cos(pi n / 5)) / 2 for n = 1..5."""


def _rates(schedule: str, steps: int, **optim: float) -> list[float]:
    config = OptimConfig(lr=2.0, schedule=schedule, **optim)
    with worlds.layout(tp=1, ep=1) as context:
        arch = read_architecture(worlds.FIXTURES / "dense")
        built = build_model(arch, worlds.FP32, context, with_mtp=True)
        load_hf(worlds.FIXTURES / "dense", arch, Shard(), built.trunk, built.mtp)
        state: TrainState = build_state(built, context, config, steps, models.PLAIN_DDP)
        found = []
        for _ in range(steps):
            state.scheduler.step(1)
            rates = {group["lr"] for group in state.optimizer.param_groups}
            assert len(rates) == 1, "every group follows one schedule"
            found += rates
    return found


@pytest.mark.parametrize(
    ("schedule", "steps", "optim", "expected"),
    [
        ("constant", 4, {}, [2.0] * 4),
        ("constant", 5, {"warmup_steps": 4}, [0.5, 1.0, 1.5, 2.0, 2.0]),
        ("cosine", 5, {"min_lr_ratio": 0.0}, [2.0 * x for x in COSINE_5]),
        ("cosine", 5, {"min_lr_ratio": 0.25}, [0.5 + 1.5 * x for x in COSINE_5]),
        ("cosine", 7, {"min_lr_ratio": 0.0, "warmup_steps": 2}, [1.0, 2.0, *(2.0 * x for x in COSINE_5)]),
        ("cosine", 9, {"min_lr_ratio": 0.25, "warmup_steps": 2, "decay_steps": 5},
         [1.0, 2.0, *(0.5 + 1.5 * x for x in COSINE_5), 0.5, 0.5]),
        # A fifth of ten steps: two steps of decay, the last at the smallest rate.
        ("wsd", 10, {"min_lr_ratio": 0.25, "warmup_steps": 2}, [1.0, *[2.0] * 7, 1.25, 0.5]),
        ("wsd", 6, {"min_lr_ratio": 0.0, "decay_steps": 4}, [2.0, 2.0, 1.5, 1.0, 0.5, 0.0]),
    ],
)  # fmt: skip
def test_every_step_of_a_short_run(schedule: str, steps: int, optim: dict[str, float], expected: list[float]):
    assert _rates(schedule, steps, **optim) == pytest.approx(expected, abs=1e-6)


def test_the_rate_reported_is_the_rate_used():
    """Adam's first step moves a weight by the learning rate: the first of three warm-up steps is not 0."""
    with worlds.layout(tp=1, ep=1) as context:
        config = OptimConfig(lr=3e-3, schedule="constant", warmup_steps=3, weight_decay=0.0, eps=1e-12, clip_grad=None)
        state = build_state(worlds.fixture_model("moe", context), context, config, 10, models.PLAIN_DDP)
        for expected in (1e-3, 2e-3, 3e-3, 3e-3):
            before = models.weights(state)["mtp.eh_proj.weight"]
            result = train_step(state, worlds.microbatches(1), worlds.OBJECTIVE)
            assert result.metrics["train/lr"] == pytest.approx(expected)
            moved = (models.weights(state)["mtp.eh_proj.weight"] - before).abs().median()
            if state.step == 1:
                assert float(moved) == pytest.approx(expected, rel=1e-2)
            assert 0 < float(moved) < 1.5 * expected
