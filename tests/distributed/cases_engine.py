"""Rollouts on several ranks against rollouts without any split, and ranks that would disagree."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bailing_mtp.contracts.samples import PartialGroup, Prompt, RolloutGroup, SamplingParams
from bailing_mtp.kernels.reference import norm
from bailing_mtp.parallel import collectives
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.rollout.graphs import StepShape
from bailing_mtp.rollout.launch import DecodeSteps
from bailing_mtp.rollout.program import Program
from bailing_mtp.rollout.stats import RolloutStats
from tests.distributed import worlds
from tests.rollout.engine_rig import Scripted, all_samples, make_engine, random_prompts, responses
from tests.rollout.test_graphs import FakeCapturer

VOCAB, DRAFTS = 512, 2
PLAIN = SamplingParams(max_new_tokens=9, seed=5)
KINDS = (
    PLAIN,
    SamplingParams(temperature=0.0, max_new_tokens=12),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.9, max_new_tokens=6, seed=7),
    SamplingParams(suppress_token_ids=(1, 300), stop_token_ids=tuple(range(0, VOCAB, 9)), min_new_tokens=3, seed=2),
)


def _prompts(n: int) -> list[Prompt]:
    """Every kind of sampling, prompts longer than a prefill, some with several samples."""
    made = random_prompts(n, VOCAB, PLAIN, seed=3, longest=22)
    return [
        replace(p, sampling=replace(KINDS[p.index % 4], max_new_tokens=9), samples_per_prompt=1 + p.index % 2)
        for p in made
    ]


def _rollout(context: ParallelContext, prompts: Sequence[Prompt]) -> tuple[list[RolloutGroup], RolloutStats]:
    engine = make_engine(worlds.fixture_model("moe", context), context, DRAFTS)
    return engine.generate(prompts), engine.stats


def engine(reference: worlds.Reference, scratch: Path, tp: int, ep: int) -> None:
    """The same tokens and log-probabilities on every rank; also when replicas run dry early, or have no prompt."""
    for prompts in (_prompts(5), _prompts(1)):
        with worlds.layout(1, 1) as alone:
            expected, whole = _rollout(alone, prompts)
        with worlds.layout(tp, ep) as context:
            found, stats = _rollout(context, prompts)
        assert responses(found) == responses(expected)
        for ours, theirs in zip(all_samples(found), all_samples(expected), strict=True):
            assert ours.finish_reason == theirs.finish_reason
            for name in ("logprobs", "processed_logprobs", "kept_logmass"):
                values = (getattr(sample, name) or () for sample in (ours, theirs))
                mine, other = (torch.tensor(list(numbers)) for numbers in values)
                torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)
        assert (stats.tokens, stats.samples, stats.reached) == (whole.tokens, whole.samples, whole.reached)


def engine_oversampled(reference: worlds.Reference, scratch: Path, tp: int, ep: int) -> None:
    """Rollouts that end with two complete groups, until all are: every rank parts alike, the tokens are those of one
    whole rollout without any split, and a replica that has nothing left goes on counting with the others."""
    prompts = _prompts(7)
    with worlds.layout(1, 1) as alone:
        expected, whole = _rollout(alone, prompts)
    with worlds.layout(tp, ep) as context:
        engine = make_engine(worlds.fixture_model("moe", context), context, DRAFTS, max_running=2)
        carried = [PartialGroup(prompt, 0) for prompt in prompts]
        found: dict[int, RolloutGroup] = {}
        n_tokens, was_cut = 0, False
        while carried:
            complete, carried = engine.advance(carried, min(2, len(carried)))
            assert len(complete) == min(2, len(prompts) - len(found))
            found |= {group.prompt.index: group for group in complete}
            n_tokens += engine.stats.tokens
            was_cut |= any(sample.response_ids for group in carried for sample in group.samples)
            everyone: list[object] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, (complete, carried, n_tokens))
            assert all(theirs == everyone[0] for theirs in everyone)
        assert was_cut and n_tokens == whole.tokens
        assert responses([found[prompt.index] for prompt in prompts]) == responses(expected)


def engine_adaptive(reference: worlds.Reference, scratch: Path, tp: int, ep: int) -> None:
    """Ranks that each wish for other drafts run those of the first one that has rows, to the end of all prompts."""
    for n in (5, 1):
        prompts = [replace(p, sampling=replace(KINDS[1], max_new_tokens=9 + 12 * (p.index % 2))) for p in _prompts(n)]
        with worlds.layout(1, 1) as alone:
            plain = make_engine(worlds.fixture_model("moe", alone), alone).generate(prompts)
        with worlds.layout(tp, ep) as context:
            engine = make_engine(worlds.fixture_model("moe", context), context, DRAFTS, adaptive=True)
            wishes = [(2, 0, 1), (1, 2, 0)][context.rank]
            controller = engine._controller = Scripted(wishes)
            assert responses(engine.generate(prompts)) == responses(plain)
            everyone: list[object] = [None, None]
            dist.all_gather_object(everyone, controller.ran)
            assert everyone[0] == everyone[1]
            drafts = [k for _, k in controller.ran]
            # With several prompts the second replica goes on when the first has nothing left.
            first = len(drafts) if tp == 2 or n == 1 else next(i for i in range(3, 99) if drafts[i] != (2, 0, 1)[i % 3])
            assert drafts[:first] == [(2, 0, 1)[i % 3] for i in range(first)] and first >= 3


def engine_reduced(reference: worlds.Reference, scratch: Path, tp: int, ep: int) -> None:
    """Drafts from a part of the vocabulary that lies on both ranks, and from one that lies on the second alone."""
    for ids in (range(0, VOCAB, 3), range(VOCAB // 2, VOCAB, 2)):
        path = scratch / f"drafts_{ids.start}_{dist.get_rank()}.json"
        path.write_text(json.dumps(list(ids)))
        found = []
        for layout in ((1, 1), (tp, ep)):
            with worlds.layout(*layout) as context:
                model = worlds.fixture_model("moe", context)
                engine = make_engine(model, context, DRAFTS, draft_vocabulary=str(path))
                found.append((responses(engine.generate(_prompts(5))), engine.stats.accepted))
        assert found[0] == found[1]


class CountedSums:
    """In the place of PeerSums, where no GPU is: the group's own sum."""

    latest: CountedSums

    def __init__(self, group: dist.ProcessGroup, rows: int) -> None:
        self.group, self.rows, self.summed, self.normed = group, rows, 0, 0
        CountedSums.latest = self

    @staticmethod
    def make(
        group: dist.ProcessGroup, rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> CountedSums:
        return CountedSums(group, rows)

    def __call__(self, x: Tensor) -> Tensor:
        self.summed += len(x) <= self.rows
        total = x.clone()
        dist.all_reduce(total, group=self.group)
        return total

    def add_rms_norm(self, x_RH: Tensor, part_RH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        self.normed += 1
        return norm.add_rms_norm(x_RH, self(part_RH), weight_H, eps)


def engine_peer(reference: worlds.Reference, scratch: Path, tp: int, ep: int) -> None:
    """Sums that leave their input alone, alone or with a norm, may stand in for the group's: the same tokens."""
    found = []
    with worlds.layout(tp, ep) as context, mock.patch("bailing_mtp.rollout.peers.PeerSums", CountedSums):
        model = worlds.fixture_model("moe", context)
        for tp_sum in ("library", "peer"):
            engine = make_engine(model, context, DRAFTS, tp_sum=tp_sum, keep_memory=True)
            found.append(responses(engine.generate(_prompts(3))))
        counted = CountedSums.latest
        assert found[0] == found[1] and counted.rows == 4 * (DRAFTS + 1)
        assert counted.summed > counted.normed > 100
        engine.release()
        assert engine._peers is None


def engine_graph_groups(reference: worlds.Reference, scratch: Path, tp: int, ep: int) -> None:
    """Everything inside captured steps talks in the groups of the graphs, everything else in the ordinary ones; they
    are made once for a context and end with it."""
    used: dict[bool, set[dist.ProcessGroup]] = {False: set(), True: set()}
    inside = False

    def watched(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, group: dist.ProcessGroup | None = None, **kwargs: object) -> object:
            used[inside].add(group)
            return real(*args, group=group, **kwargs)

        return call

    def run(self: DecodeSteps, shape: StepShape) -> None:
        nonlocal inside
        inside = True
        plain_run(self, shape)
        inside = False

    plain_run = DecodeSteps._run
    with worlds.layout(1, 1) as alone:
        expected = responses(_rollout(alone, _prompts(5))[0])
    with worlds.layout(tp, ep) as context, contextlib.ExitStack() as patches:
        assert context.for_graphs is context
        # What decides is the device; the groups are of the world's backend.
        pretended = replace(context, device=torch.device("cuda"))
        graphs = replace(pretended.for_graphs, device=context.device)
        assert pretended.for_graphs is pretended.for_graphs
        mine, ordinary = ({place.tp_group, place.ep_group} for place in (graphs, context))
        assert len(mine) == 2 and not mine & ordinary
        for module, *names in ((dist, "all_reduce", "broadcast"), (collectives, "_all_gather", "_reduce_scatter")):
            for name in names:
                patches.enter_context(mock.patch.object(module, name, watched(getattr(module, name))))
        patches.enter_context(mock.patch.object(DecodeSteps, "_run", run))
        patches.enter_context(mock.patch.dict(vars(context), for_graphs=graphs))
        engine = make_engine(worlds.fixture_model("moe", context), context, DRAFTS, cuda_graphs=True)
        engine._make_capturer = FakeCapturer
        assert responses(engine.generate(_prompts(5))) == expected
        inside_group, group = (graphs.tp_group, context.tp_group) if tp > 1 else (graphs.ep_group, context.ep_group)
        assert used[True] == {inside_group}, used
        assert group in used[False] and not mine & used[False]
    assert not mine & set(dist.distributed_c10d._world.pg_map)


def engine_disagreement(reference: worlds.Reference, scratch: Path) -> None:
    """A rank with other logits and another seed follows the first: one set of tokens, and no hang."""
    logits = Program.logits

    def perturbed(program: Program, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        exact = logits(program, hidden, out)
        return exact.add_(torch.randn_like(exact), alpha=1e-3) if program.context.tp_rank else exact

    with worlds.layout(2, 1) as context, mock.patch.object(Program, "logits", perturbed):
        seed = 5 + context.tp_rank
        prompts = [replace(p, sampling=replace(p.sampling, seed=seed)) for p in _prompts(5)]
        found, stats = _rollout(context, prompts)
        everyone: list[object] = [None, None]
        dist.all_gather_object(everyone, (responses(found), stats.accepted))
        assert everyone[0] == everyone[1]
        assert stats.samples == sum(p.samples_per_prompt for p in prompts)


def engine_refusal(reference: worlds.Reference, scratch: Path) -> None:
    """A prompt that only one replica would run is refused by both, before anything waits for the other."""
    with worlds.layout(1, 2) as context:
        prompts = _prompts(2)
        prompts[1] = replace(prompts[1], prompt_ids=(VOCAB,))
        with pytest.raises(ValueError, match="prompt 1: prompt_ids: 512 is no token"):
            _rollout(context, prompts)
