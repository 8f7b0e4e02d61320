"""The choice of k in simulated rollouts: costs and acceptance are known, so that every loss can be counted."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from bailing_mtp.rollout.controller import Controller

Costs = Callable[[int, int], float]
STEPS = 2000


def expected(chances: Sequence[float], k: int) -> float:
    """Tokens of a row in a step."""
    total = chance = 1.0
    for passes in chances[:k]:
        chance *= passes
        total += chance
    return total


@dataclass
class Outcome:
    drafts: list[int]
    tokens: float
    """Expected ones, so that no luck hides a loss."""
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def simulate(
    controller: Controller,
    cost_s: Costs,
    chances: Callable[[int], Sequence[float]],
    rows: Callable[[int], int],
    steps: int = STEPS,
    noise: float = 0.03,
    seed: int = 0,
    hiccup: float = 0.0,
) -> Outcome:
    """Steps whose results are read when the next one is launched already. hiccup: chance that a time is tenfold."""
    rng, out, unread = random.Random(seed), Outcome([], 0.0, 0.0), None
    for step in range(steps):
        n = rows(step)
        k = controller.choose(n)
        controller.launched(n, k)
        seconds = cost_s(n, k) * (1 + noise * rng.uniform(-1, 1))
        out.drafts.append(k)
        out.tokens += n * expected(chances(step), k)
        out.seconds += cost_s(n, k)
        reached, accepted, left = [], [], n
        for passes in chances(step)[:k]:
            reached.append(left)
            left = sum(rng.random() < passes for _ in range(left))
            accepted.append(left)
        rest = [0] * (len(chances(step)) - k)
        news = (n, k, (n, k), seconds * (10 if rng.random() < hiccup else 1)), (reached + rest, accepted + rest)
        if unread is not None:
            controller.timed(*unread[0])
            controller.tested(*unread[1])
        unread = news
    return out


def fixed(cost_s: Costs, chances: Callable[[int], Sequence[float]], rows: Callable[[int], int], k: int) -> Outcome:
    tokens = sum(rows(step) * expected(chances(step), k) for step in range(STEPS))
    return Outcome([k] * STEPS, tokens, sum(cost_s(rows(step), k) for step in range(STEPS)))


def cheap(n: int, k: int) -> float:
    return 1e-3 * (5 + 0.02 * n) * (1 + 0.12 * k)


def dear(n: int, k: int) -> float:
    return 1e-3 * (5 + 0.2 * n) * (1 + 0.9 * k)


def by_size(n: int, k: int) -> float:
    """Drafts pay in small batches only."""
    return 1e-3 * (5 + 0.02 * n) * (1 + (0.1 if n <= 16 else 0.6) * k)


@pytest.mark.parametrize("n", [1, 8, 64])
def test_drafts_that_pay_run_from_the_start(n: int):
    out = simulate(Controller(3), cheap, lambda step: (0.9, 0.85, 0.8), lambda step: n)
    assert out.drafts[0] == 3 and out.drafts.count(3) > 0.97 * STEPS
    assert out.rate > 0.98 * fixed(cheap, lambda step: (0.9, 0.85, 0.8), lambda step: n, 3).rate


@pytest.mark.parametrize("n", [1, 8, 64])
@pytest.mark.parametrize("chances", [(0.0, 0.0), (0.4, 0.3), (0.8, 0.7)])
def test_drafts_that_do_not_pay_end_soon(n: int, chances: tuple[float, float]):
    out = simulate(Controller(2), dear, lambda step: chances, lambda step: n)
    assert out.drafts[25:100].count(0) > 70 and out.drafts.count(0) > 0.97 * STEPS
    assert out.rate > 0.98 * fixed(dear, lambda step: chances, lambda step: n, 0).rate


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("n", [1, 8])
@pytest.mark.parametrize("slope", [0.05, 0.2, 0.35, 0.6])
@pytest.mark.parametrize("chances", [(0.1, 0.1, 0.1), (0.5, 0.4, 0.3), (0.7, 0.3, 0.0), (0.9, 0.8, 0.8)])
def test_the_loss_against_every_fixed_arm_is_bounded(seed: int, n: int, slope: float, chances: tuple[float, ...]):
    def cost_s(n: int, k: int) -> float:
        return 4e-3 * (1 + slope * k)

    out = simulate(Controller(3), cost_s, lambda step: chances, lambda step: n, seed=seed)
    arms = [fixed(cost_s, lambda step: chances, lambda step: n, k).rate for k in range(4)]
    assert out.rate > 0.98 * arms[0]
    assert out.rate > (0.9 if n == 1 else 0.97) * max(arms)


def test_trials_are_few():
    out = simulate(Controller(3), cheap, lambda step: (0.9, 0.85, 0.8), lambda step: 16, steps=4 * STEPS)
    assert sum(k != 3 for k in out.drafts[STEPS:]) <= 0.0085 * 3 * STEPS
    assert set(out.drafts[STEPS:]) == {0, 1, 2, 3}


def test_acceptance_that_drifts_is_followed_both_ways():
    def chances(step: int) -> Sequence[float]:
        return (0.9, 0.85) if step < 700 or step >= 1400 else (0.05, 0.05)

    out = simulate(Controller(2), lambda n, k: 5e-3 * (1 + 0.25 * k), chances, lambda step: 32)
    assert out.drafts[600:700].count(2) > 95
    assert out.drafts[800:1400].count(0) > 0.95 * 600
    # Without drafts only trials tell that they would be accepted again.
    assert out.drafts[1850:].count(2) > 140


def test_other_sizes_take_over_what_is_known():
    """A batch that empties bucket by bucket: no bucket is begun with a search."""
    sizes = (64, 48, 32, 24, 16, 12, 8, 4, 2, 1)
    out = simulate(Controller(2), dear, lambda step: (0.5, 0.5), lambda step: sizes[step // 200])
    assert out.drafts[30:].count(0) > 0.98 * (STEPS - 30)


@pytest.mark.parametrize("period", [1, 3, 10])
def test_a_batch_between_two_buckets_loses_nothing(period: int):
    def rows(step: int) -> int:
        return 16 if step // period % 2 else 24

    def chances(step: int) -> Sequence[float]:
        return (0.6, 0.5)

    for cost_s in (by_size, cheap, dear):
        out = simulate(Controller(2), cost_s, chances, rows)
        assert out.rate > 0.98 * max(fixed(cost_s, chances, rows, k).rate for k in range(3))


def test_arms_as_good_as_each_other_do_not_flap():
    """The expected gain of a draft is what it costs: only trials, and what noise beyond the margin asks for."""
    out = simulate(Controller(1), lambda n, k: 5e-3 * (1 + 0.6 * k), lambda step: (0.6,), lambda step: 48)
    assert sum(a != b for a, b in zip(out.drafts, out.drafts[1:], strict=False)) < 120


def test_a_long_time_is_no_cost():
    out = simulate(
        Controller(2), cheap, lambda step: (0.8, 0.7), lambda step: 16, hiccup=0.02, steps=4 * STEPS
    )
    assert out.drafts.count(2) > 0.97 * 4 * STEPS


def test_a_machine_that_has_become_slow_is_believed():
    controller = Controller(1)
    for seconds in (9.0, 1.0, 1.0, 50.0, 1.0, 50.0, 50.0, 50.0):
        controller.launched(4, 0)
        controller.timed(4, 0, "shape", seconds)
    assert controller._arms[4][0].cost_s == 50.0


def test_captures_are_paid_for():
    """The first step of each shape takes 300 steps' time: at first k = 0 is captured for a trial, the others wait."""
    captured: set[tuple[int, int]] = set()
    controller = Controller(3)

    def timed(n: int, k: int, shape: object, seconds: float) -> None:
        Controller.timed(controller, n, k, shape, seconds if (n, k) in captured else 300 * seconds)
        captured.add((n, k))

    watched = Controller(3)
    watched.timed, controller = timed, watched
    out = simulate(watched, cheap, lambda step: (0.9, 0.85, 0.8), lambda step: 16)
    assert captured == {(16, 3), (16, 0)} and out.drafts.count(0) <= 4


def test_what_is_not_timed_is_not_tried():
    controller = Controller(2)
    assert [controller.choose(8, may_try=False) for _ in range(5)] == [2] * 5
    for _ in range(40):
        controller.launched(8, controller.choose(8, may_try=False))
        controller.timed(8, 2, "shape", None)
        controller.tested([8, 0], [0, 0])
    assert controller.choose(8, may_try=False) == 0
    assert controller.choose(0) == controller.choose(0, may_try=False)


def test_the_same_news_give_the_same_choices():
    runs = [simulate(Controller(3), by_size, lambda step: (0.7, 0.6, 0.5), lambda step: 1 + step % 40) for _ in "ab"]
    assert runs[0].drafts == runs[1].drafts
