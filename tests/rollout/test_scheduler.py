"""Blocks, slots and order of work, with a program that only pretends."""

from __future__ import annotations

import random

import pytest

from bailing_mtp.rollout.blocks import BlockPool, OutOfBlocks, blocks_for
from bailing_mtp.rollout.scheduler import Scheduler
from bailing_mtp.rollout.sequences import Assign, Fork, Group, Open, Plan, Row

BLOCK = 4


class Machine:
    """Follows plans as the engine does and holds every promise of the scheduler against what it sees."""

    def __init__(self, scheduler: Scheduler, max_running: int, n_templates: int, ahead: int, seed: int = 0) -> None:
        self.scheduler, self.sizes, self.ahead = scheduler, (max_running, n_templates), ahead
        self.random = random.Random(seed)
        self.tables: dict[int, list[int]] = {}
        self.filled: dict[int, int] = {}
        self.steps = self.preempted = 0

    def run(self, between=lambda: None) -> None:
        while self.scheduler.has_work:
            self.step()
            between()
            self.scheduler.check_integrity(*self.sizes)

    def step(self) -> Plan:
        running_before = set(self.scheduler.running)
        plan = self.scheduler.plan()
        self.preempted += len(running_before - set(plan.decode))
        self.apply(plan.before)
        for chunk in plan.chunks:
            assert self.filled[chunk.slot] == chunk.start
            self.filled[chunk.slot] += chunk.length
            assert blocks_for(self.filled[chunk.slot], BLOCK) <= len(self.tables[chunk.slot])
        self.apply(plan.after)
        for row, group in plan.starters:
            assert self.filled[row.slot] == row.fill_tokens
            assert group is None or row in group.rows
            if not row.response:
                self.add(row, 1)
        decode = [row for row in (*plan.decode, *(row for row, _ in plan.starters)) if row.state == "running"]
        assert len({row.slot for row in decode}) == len(decode)
        self.no_block_is_written_by_two(decode)
        for row in decode:
            assert self.tables[row.slot] == row.blocks
            needed = min(row.fill_tokens + self.ahead, row.limit_tokens)
            assert blocks_for(needed, BLOCK) <= len(row.blocks), "a step would write past its blocks"
            self.add(row, self.random.randint(1, self.ahead))
        self.steps += 1
        return plan

    def add(self, row: Row, count: int) -> None:
        count = min(count, row.max_new_tokens - len(row.response))
        row.response += [0] * count
        if row.slot in self.filled:
            self.filled[row.slot] = row.fill_tokens
        if len(row.response) == row.max_new_tokens:
            self.scheduler.finish(row)

    def apply(self, events) -> None:
        for event in events:
            if isinstance(event, Open):
                self.tables[event.slot], self.filled[event.slot] = [], 0
            elif isinstance(event, Assign):
                assert event.first == len(self.tables[event.slot])
                self.tables[event.slot] += event.blocks
            elif isinstance(event, Fork):
                self.fork(event)

    def fork(self, event: Fork) -> None:
        source = self.tables[event.source_slot]
        tokens = len(event.group.prompt_ids)
        assert self.filled[event.source_slot] == tokens, "forked from an unfinished template"
        shared = (tokens - 1) // BLOCK if event.copied else blocks_for(tokens, BLOCK)
        assert list(event.blocks[:shared]) == source[:shared]
        if event.copied:
            assert event.copied == (source[shared], event.blocks[shared])
            assert event.blocks[shared] not in source
        self.tables[event.slot], self.filled[event.slot] = list(event.blocks), tokens

    def no_block_is_written_by_two(self, decode: list[Row]) -> None:
        written = [
            block for row in decode for block in row.blocks[(len(row.prompt_ids) - 1) // BLOCK :]
        ]
        assert len(set(written)) == len(written), "two rows write one block"


def scheduler(
    max_running: int = 8, n_templates: int = 2, n_blocks: int = 64, prefill: int = 16, k: int = 2
) -> Scheduler:
    return Scheduler(max_running, n_templates, n_blocks, BLOCK, prefill, k)


def machine(seed: int = 0, **sizes: int) -> Machine:
    made = scheduler(**sizes)
    return Machine(made, sizes.get("max_running", 8), sizes.get("n_templates", 2), sizes.get("k", 2) + 1, seed)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("n_blocks", "k"), [(200, 2), (24, 3), (12, 0), (10, 1)])
def test_500_requests_over_8_slots(seed: int, n_blocks: int, k: int):
    """Random lengths, group sizes and cancellations; with few blocks rows are preempted."""
    rng = random.Random(seed)
    m = machine(seed, n_blocks=n_blocks, k=k)
    rows: list[Row] = []

    def submit() -> None:
        if len(rows) < 500:
            prompt = (0,) * rng.randint(1, 20)
            rows.extend(m.scheduler.submit(prompt, rng.choice([1, 1, 2, 5]), rng.randint(1, 20)))

    def between() -> None:
        for _ in range(rng.randint(0, 4)):
            submit()
        if rng.random() < 0.2:
            m.scheduler.finish(rng.choice(rows))

    submit()
    m.run(between)
    assert len(rows) >= 500 and all(row.state == "done" for row in rows)
    assert m.scheduler.pool.n_free == n_blocks
    if n_blocks <= 24:
        assert m.preempted > 10


def test_lone_sequence_may_fill_the_whole_pool():
    for n_samples in (1, 3):
        m = machine(n_blocks=6, k=3)
        m.scheduler.submit((0,) * 14, n_samples, 10)
        m.run()
        assert m.scheduler.pool.n_free == 6


def test_templates_that_hold_everything_give_way():
    m = machine(max_running=2, n_templates=4, n_blocks=8, k=2)
    for _ in range(4):
        m.scheduler.submit((0,) * 16, 3, 16)
    m.run()
    assert m.scheduler.pool.n_free == 8


@pytest.mark.parametrize("start", range(1, 9))
@pytest.mark.parametrize("k", [0, 1, 3])
def test_block_borders(start: int, k: int):
    """Block of four, every start length: a row has exactly the blocks of its next step, and gives all back."""
    m = machine(n_blocks=40, k=k)
    (row,) = m.scheduler.submit((0,) * start, 1, 12)
    while m.scheduler.has_work:
        m.step()
        if row.state == "running":
            before_step = len(row.blocks) * BLOCK
            assert before_step <= start + 12 + BLOCK
    assert m.scheduler.pool.n_free == 40


def test_prefill_is_cut_at_the_budget_and_decoding_goes_on_meanwhile():
    m = machine(prefill=5, n_blocks=100)
    m.scheduler.submit((0,) * 3, 1, 30)
    m.step()
    m.scheduler.submit((0,) * 12, 1, 5)
    lengths = []
    for _ in range(3):
        plan = m.step()
        lengths.append([chunk.length for chunk in plan.chunks])
        assert len(plan.decode) == 1
    assert lengths == [[5], [5], [2]]


def test_one_prefill_serves_all_samples_and_the_last_takes_the_template_over():
    m = machine(max_running=3, n_blocks=100, prefill=64)
    rows = m.scheduler.submit((0,) * 10, 5, 6)
    plan = m.step()
    assert [chunk.length for chunk in plan.chunks] == [10]
    assert [fork.row for fork in plan.after] == rows[:3] and all(fork.copied for fork in plan.after)
    m.run()
    assert all(row.state == "done" for row in rows)


def test_the_youngest_gives_way_and_comes_back_with_its_tokens():
    m = machine(max_running=2, n_blocks=7, k=0, prefill=64)
    (old,) = m.scheduler.submit((0,) * 8, 1, 12)
    (young,) = m.scheduler.submit((0,) * 8, 1, 12)
    seen = []
    while m.scheduler.has_work:
        plan = m.step()
        seen.append((old.state, young.state))
        for chunk in plan.chunks:
            if chunk.sequence is young and young.response:
                assert chunk.sequence.fill_tokens == 8 + len(young.response) - 1
    assert ("running", "waiting") in seen and ("waiting", "running") not in seen
    assert len(old.response) == len(young.response) == 12


def test_cancellation_in_every_state():
    m = machine(max_running=2, n_templates=1, n_blocks=60, prefill=4)
    running = m.scheduler.submit((0,) * 2, 1, 50)[0]
    m.step()
    filling = m.scheduler.submit((0,) * 20, 1, 5)[0]
    template = m.scheduler.submit((0,) * 20, 2, 5)
    queued = m.scheduler.submit((0,) * 9, 2, 5)
    m.step()
    assert (running.state, filling.state, queued[0].state) == ("running", "filling", "waiting")
    for row in (running, filling, template[0], queued[0], queued[1], template[1], running):
        m.scheduler.finish(row)
        m.scheduler.check_integrity(2, 1)
    assert not m.scheduler.has_work and m.scheduler.pool.n_free == 60


def test_two_schedulers_decide_alike():
    def trace() -> list:
        m = machine(seed=5, n_blocks=12)
        for index in range(30):
            m.scheduler.submit((0,) * (1 + index % 13), 1 + index % 3, 1 + index % 9)
        plans = []
        while m.scheduler.has_work:
            plan = m.step()
            plans.append(([c.length for c in plan.chunks], [row.key for row in plan.decode], len(plan.before)))
        return plans

    assert trace() == trace()


def test_blocks_are_counted():
    pool = BlockPool(4)
    a = pool.allocate(2)
    pool.share(a[:1])
    pool.check_integrity([a, a[:1]])
    with pytest.raises(OutOfBlocks, match="3 blocks asked for, 2 of 4 free"):
        pool.allocate(3)
    pool.free(a)
    assert pool.n_free == 3
    with pytest.raises(AssertionError, match="references do not match"):
        pool.check_integrity([])
    pool.free(a[:1])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(a[:1])
    pool.check_integrity([])


def test_group_state_is_kept_apart():
    group = Group(3, rows=[Row(3, prompt_ids=(1, 2))])
    assert group.prompt_ids == (1, 2) and not group.is_ready and group.key > group.rows[0].key
