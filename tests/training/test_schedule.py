"""Learning rates that the optimizer really gets, step by step, against their formulas."""

import math
from collections.abc import Iterator

import pytest

from bailing_mtp.config import OptimConfig
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.training.state import build_state
from tests.distributed import worlds

STEPS, LR, LOWEST = 20, 0.01, 0.001


@pytest.fixture(scope="module")
def context() -> Iterator[ParallelContext]:
    with worlds.layout(tp=1, ep=1) as context:
        yield context


def rates(context: ParallelContext, **optim: object) -> list[float]:
    config = OptimConfig(lr=LR, min_lr_ratio=LOWEST / LR, **optim)
    state = build_state(worlds.fixture_model("moe", context), context, config, STEPS)
    found = []
    for _ in range(STEPS):
        state.scheduler.step(1)
        groups = {group["lr"] for group in state.optimizer.param_groups}
        assert len(groups) == 1
        found.append(groups.pop())
    return found


def cosine(share: float) -> float:
    return LOWEST + (LR - LOWEST) * (1 + math.cos(math.pi * share)) / 2


def test_warmup_rises_linearly_and_constant_stays(context: ParallelContext):
    expected = [LR * min(1.0, step / 4) for step in range(1, STEPS + 1)]
    assert rates(context, schedule="constant", warmup_steps=4) == pytest.approx(expected)


def test_cosine_falls_to_the_lowest_rate_at_the_last_step(context: ParallelContext):
    expected = [LR * step / 4 for step in range(1, 5)] + [cosine((step - 4) / 16) for step in range(5, STEPS + 1)]
    found = rates(context, schedule="cosine", warmup_steps=4)
    assert found == pytest.approx(expected) and found[-1] == pytest.approx(LOWEST)


def test_cosine_of_fewer_steps_stays_low_afterwards(context: ParallelContext):
    expected = [cosine(min(1.0, step / 10)) for step in range(1, STEPS + 1)]
    assert rates(context, schedule="cosine", decay_steps=10) == pytest.approx(expected)


def test_wsd_is_constant_then_falls_linearly_over_the_last_fifth(context: ParallelContext):
    fall = [LR - (LR - LOWEST) * step / 4 for step in range(1, 5)]
    expected = [LR * step / 2 for step in range(1, 3)] + [LR] * 14 + fall
    assert rates(context, schedule="wsd", warmup_steps=2) == pytest.approx(expected)


def test_wsd_with_its_own_decay(context: ParallelContext):
    fall = [LR - (LR - LOWEST) * step / 8 for step in range(1, 9)]
    assert rates(context, schedule="wsd", decay_steps=8) == pytest.approx([LR] * 12 + fall)
