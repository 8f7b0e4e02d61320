"""Prompts that are under way between rollouts: which ones run, what a checkpoint keeps of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from bailing_mtp.config import RlConfig
from bailing_mtp.contracts.samples import PartialGroup, RolloutGroup
from bailing_mtp.data.tokenizer import Tokenizer
from bailing_mtp.rollout.tally import Advanced
from recipes.backlog import Backlog
from tests.grpo.test_prompts import loader, tokenizer
from tests.rl.test_advantages_and_samples import sample

__all__ = ["tokenizer"]


class Engine:
    """Completes the groups that it is told to, by place, else the first; the others get a token a rollout more."""

    def __init__(self) -> None:
        self.seen: list[tuple[PartialGroup, ...]] = []
        self.required: list[frozenset[int]] = []
        self.completes: Sequence[int] | None = None

    def advance(
        self, groups: Sequence[PartialGroup], enough: int, required: frozenset[int], progress: Callable
    ) -> Advanced:
        self.seen.append(tuple(groups))
        self.required.append(required)
        chosen = self.completes or range(enough)
        assert len(chosen) == enough
        done = [RolloutGroup(groups[place].prompt, ()) for place in chosen]
        return Advanced(done, [_further(group) for place, group in enumerate(groups) if place not in chosen])


def _further(group: PartialGroup) -> PartialGroup:
    index, n_tokens = group.prompt.index, 1 + len(group.samples and group.samples[0].response_ids)
    parts = [("unfinished", n_tokens), ("stop", 3), ("unfinished", 0)]
    samples = [
        replace(
            sample(index, i, 0, n, finish_reason=reason, versions=tuple(range(n))),
            prompt_ids=group.prompt.prompt_ids,
            routes=np.full((3, 2, 4), index + 200, np.int16) if reason == "stop" else None,
            logprobs=tuple(-0.1 / (3 + place) for place in range(n)),
        )
        for i, (reason, n) in enumerate(parts)
    ]
    return replace(group, samples=tuple(samples))


def backlog(tmp_path: Path, tokenizer: Tokenizer, **rl: object) -> Backlog:
    return Backlog(loader(tmp_path, tokenizer), RlConfig(prompts_per_rollout=2, **rl))


def test_without_oversampling_every_rollout_is_its_own_draw(tmp_path: Path, tokenizer: Tokenizer):
    found, same, engine = backlog(tmp_path, tokenizer), loader(tmp_path, tokenizer), Engine()
    for _ in range(3):
        found.roll(engine, print)
        drawn = same.draw(2)
        assert engine.seen[-1] == tuple(PartialGroup(prompt, same.rollouts) for prompt in drawn)
        assert engine.required[-1] == frozenset()
        assert found.state_dict() == same.state_dict() and found.metrics() == {}


def test_carried_prompts_come_first_and_keep_their_noise_key(tmp_path: Path, tokenizer: Tokenizer):
    found, engine = backlog(tmp_path, tokenizer, oversample=2.0, carry_limit=2), Engine()
    assert found.n_under_way == 4 and backlog(tmp_path, tokenizer, oversample=1.05).n_under_way == 3
    assert Backlog(found.prompts, RlConfig(prompts_per_rollout=10, oversample=1.1)).n_under_way == 11
    for engine.completes in ((1, 2), (2, 3), (0, 2), (0, 1)):
        complete = found.roll(engine, print)
        assert len(complete) == 2
    keys = [[(group.rollout_step, group.prompt.index) for group in groups] for groups in engine.seen]
    assert keys == [
        [(1, 0), (1, 1), (1, 2), (1, 3)],
        [(1, 0), (1, 3), (2, 1), (2, 2)],
        [(1, 0), (1, 3), (3, 1), (3, 2)],
        [(1, 3), (3, 2), (4, 0), (4, 1)],
    ]
    assert engine.required == [frozenset(), frozenset(), frozenset({0, 3}), frozenset({3})]
    assert len({key for groups in keys for key in groups}) == len({id(g.prompt) for s in engine.seen for g in s}) == 10
    # Both carried groups have one sample with a token and one that has ended.
    assert found.metrics() == {"rollout/carried_samples": 4}


def test_what_is_carried_survives_a_checkpoint(tmp_path: Path, tokenizer: Tokenizer):
    found, engine = backlog(tmp_path, tokenizer, oversample=2.0), Engine()
    found.roll(engine, print)
    found.roll(engine, print)
    state = json.loads(json.dumps(found.state_dict()))
    again, other = backlog(tmp_path, tokenizer, oversample=2.0), Engine()
    again.load_state_dict(state)
    for each, its in ((found, engine), (again, other)):
        each.roll(its, print)
    (ours,), theirs = other.seen, engine.seen[-1]
    assert ours == theirs and len(ours[0].samples) == 3 and ours[0].samples[0].versions
    assert [group.prompt.record for group in ours] == [group.prompt.record for group in theirs]
    for mine, other in zip(ours[0].samples, theirs[0].samples, strict=True):
        assert (mine.routes is None) == (other.routes is None) == (mine.finish_reason != "stop")
        assert mine.routes is None or (mine.routes.dtype == np.int16 and np.array_equal(mine.routes, other.routes))
    assert again.state_dict() == found.state_dict()


def test_a_checkpoint_without_carried_prompts_is_read(tmp_path: Path, tokenizer: Tokenizer):
    found, engine = backlog(tmp_path, tokenizer, oversample=1.5), Engine()
    found.load_state_dict(loader(tmp_path, tokenizer).state_dict())
    found.roll(engine, print)
    assert len(engine.seen[0]) == 3


def test_a_prompt_is_the_same_when_it_is_looked_up(tmp_path: Path, tokenizer: Tokenizer):
    prompts = loader(tmp_path, tokenizer)
    for prompt in prompts.draw(7, taken={1, 4}):
        assert prompts.prompt(prompt.number, prompt.index) == prompt
        assert prompt.index not in (1, 4)
