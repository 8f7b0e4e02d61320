"""How requests end, what is refused, and what is left on the device."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from bailing_mtp.contracts.samples import Prompt, SamplingParams
from bailing_mtp.errors import UserError
from bailing_mtp.model.build import BuiltModel
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.rollout.memory import RolloutMemory
from bailing_mtp.rollout.program import Program
from bailing_mtp.rollout.requests import Limits
from bailing_mtp.rollout.session import RolloutSession
from bailing_mtp.rollout.stats import RolloutStats
from tests.rollout.drafters import ScriptedDrafter
from tests.rollout.engine_rig import all_samples, make_engine, random_prompts, responses

VOCAB = 24
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=19)
SAMPLED = SamplingParams(temperature=1.0, max_new_tokens=15, seed=3)
LIMITS = Limits(context_tokens=40, max_running=3, n_templates=2)


class Letters:
    """Token i is the i-th letter; token 23 ends a text and has none."""

    eos_ids = (23,)

    def decode(self, ids) -> str:
        return "".join("abcdefghijklmnopqrstuvw_"[token] for token in ids if token != 23)


def test_a_rollout_is_not_held_up_by_what_is_older(small: BuiltModel, alone: ParallelContext):
    """Collections leave out what was alive before, also where a rollout fails; a user's own choice stays."""
    engine, prompts, seen = make_engine(small, alone), random_prompts(3, VOCAB, SAMPLED), []
    before = gc.get_freeze_count()

    def watch(stats: RolloutStats) -> None:
        seen.append(gc.get_freeze_count())

    def fail(stats: RolloutStats) -> None:
        raise RuntimeError("no more")

    engine.generate(prompts, progress=watch)
    assert min(seen) > 10_000 and gc.get_freeze_count() <= before
    with pytest.raises(RuntimeError, match="no more"):
        engine.generate(prompts, progress=fail)
    assert gc.get_freeze_count() <= before
    gc.freeze()
    engine.generate(prompts, progress=watch)
    assert gc.get_freeze_count() > 10_000
    gc.unfreeze()


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_row_ends_with_an_error_and_harms_no_other(
    small: BuiltModel, alone: ParallelContext, monkeypatch: pytest.MonkeyPatch, k: int, broken: float
):
    prompts = random_prompts(6, VOCAB, SAMPLED)
    expected = make_engine(small, alone, k).generate(prompts)
    verify = Program.verify

    def breaks(program, fed_nS, slots_n, *record):
        hidden = verify(program, fed_nS, slots_n, *record)
        state = program.memory.slots
        hit = (state.prompt_index[slots_n] == 2) & (state.generated[slots_n] >= 5) & (state.max_new[slots_n] > 0)
        return torch.where(hit[:, None, None], broken, hidden)

    monkeypatch.setattr(Program, "verify", breaks)
    for found, whole in zip(
        all_samples(make_engine(small, alone, k).generate(prompts)), all_samples(expected), strict=True
    ):
        if found.prompt_index != 2:
            assert found.response_ids == whole.response_ids and found.finish_reason == "length"
            assert found.logprobs == pytest.approx(whole.logprobs, abs=1e-5)
            continue
        assert found.finish_reason == "error" and 5 <= len(found.response_ids) < 15
        assert found.response_ids == whole.response_ids[: len(found.response_ids)]
        position = len(found.prompt_ids) + len(found.response_ids)
        assert found.error == f"the logits for position {position} are not finite"
        assert len(found.logprobs) == len(found.response_ids)


def test_a_prompt_whose_first_logits_are_broken(
    small: BuiltModel, alone: ParallelContext, monkeypatch: pytest.MonkeyPatch
):
    def broken(program: Program, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.full((*hidden.shape[:-1], VOCAB), torch.nan, out=out)

    monkeypatch.setattr(Program, "logits", broken)
    (sample,) = all_samples(make_engine(small, alone, 1).generate(random_prompts(1, VOCAB, SAMPLED)))
    assert (sample.finish_reason, sample.response_ids) == ("error", ())


@pytest.mark.parametrize("k", [0, 2])
def test_cancellation_in_every_state(small: BuiltModel, alone: ParallelContext, k: int):
    """Without any stop id, and with the end of text ignored; nothing joins a response or a stop set."""
    sampling = SamplingParams(max_new_tokens=20, ignore_eos=True, seed=1)
    prompts = random_prompts(6, VOCAB, sampling, samples=2, longest=18)
    prompts[3] = replace(prompts[3], prompt_ids=tuple(range(18)))
    tokenizer = Letters()
    expected = make_engine(small, alone, k, tokenizer).generate(prompts)
    whole = {(s.prompt_index, s.sample_index): s for s in all_samples(expected)}
    engine = make_engine(small, alone, k, tokenizer, prefill_tokens=4)
    session = engine.open(LIMITS)
    for prompt in prompts:
        session.submit(prompt)
    session.cancel(5, 1)
    samples, steps = [], 0
    while session.step():
        steps += 1
        if steps == 3:
            session.cancel(1)
        if steps == 9:
            session.cancel(0, 0)
        samples += session.take()
    engine.close()
    assert session.finished() and len(samples) == 12
    cancelled = {(s.prompt_index, s.sample_index) for s in samples if s.finish_reason == "cancelled"}
    assert cancelled == {(5, 1), (1, 0), (1, 1), (0, 0)}
    for sample in samples:
        key = (sample.prompt_index, sample.sample_index)
        assert sample.response_ids == whole[key].response_ids[: len(sample.response_ids)]
        assert len(sample.response_ids) == 20 or key in cancelled
    assert any(s.response_ids for s in samples if s.finish_reason == "cancelled")
    assert session.stats.tokens == sum(len(s.response_ids) for s in samples)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_end_of_text_and_stop_strings(small: BuiltModel, alone: ParallelContext, k: int):
    tokenizer, prompts = Letters(), random_prompts(8, VOCAB, GREEDY)
    ignoring = [replace(p, sampling=replace(p.sampling, ignore_eos=True)) for p in prompts]
    full = {g.prompt.index: g.samples[0].response_ids for g in make_engine(small, alone).generate(ignoring)}
    drafter = ScriptedDrafter(full, VOCAB)
    strings = {i: (tokenizer.decode(ids[6:8]), "_never_") for i, ids in full.items()}
    stopping = [replace(p, sampling=replace(p.sampling, stop_strings=strings[p.index])) for p in ignoring]
    for sample in all_samples(make_engine(small, alone, k, tokenizer, drafter).generate(stopping)):
        ids, text = full[sample.prompt_index], strings[sample.prompt_index][0]
        ends = [n for n in range(1, 20) if text in tokenizer.decode(ids[:n])]
        assert sample.response_ids == ids[: ends[0]] and sample.finish_reason == "stop"
        assert len(sample.logprobs) == len(sample.versions) == ends[0]
    for sample in all_samples(make_engine(small, alone, k, tokenizer, drafter).generate(prompts)):
        ids = full[sample.prompt_index]
        end = ids.index(23) + 1 if 23 in ids else len(ids)
        assert sample.response_ids == ids[:end]


def test_memory_is_given_back(small: BuiltModel, alone: ParallelContext):
    seen: list[weakref.ref] = []

    def watch(_) -> None:
        memory = engine._memory
        seen.extend(weakref.ref(tensor) for tensor in memory.tensors())

    prompts = random_prompts(3, VOCAB, replace(SAMPLED, max_new_tokens=3), samples=2)
    engine = make_engine(small, alone, 1)
    engine.generate(prompts, progress=watch)
    gc.collect()
    assert seen and all(ref() is None for ref in seen)
    keeping = make_engine(small, alone, 1, keep_memory=True)
    first = responses(keeping.generate(prompts))
    kept = keeping._memory
    assert isinstance(kept, RolloutMemory) and responses(keeping.generate(prompts)) == first
    assert keeping._memory is kept
    keeping.generate(random_prompts(3, VOCAB, replace(SAMPLED, max_new_tokens=9)))
    assert keeping._memory is not kept
    keeping.release()
    assert keeping._memory is None


def test_memory_is_given_back_after_a_failure(small: BuiltModel, alone: ParallelContext):
    engine = make_engine(small, alone, 1)

    def fail(_) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(random_prompts(3, VOCAB, SAMPLED), progress=fail)
    assert engine._memory is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": ()}, "prompt 7: has no tokens"),
        ({"prompt_ids": (1,) * 30}, "30 prompt tokens and sampling.max_new_tokens=15 exceed rollout.context_tokens=40"),
        ({"prompt_ids": (24,)}, "prompt_ids: 24 is no token; allowed: 0 to 23"),
        ({"sampling": replace(SAMPLED, suppress_token_ids=(-2,))}, "suppress_token_ids: -2 is no token"),
        ({"sampling": replace(SAMPLED, suppress_token_ids=tuple(range(24)))}, "leave no token to draw"),
        ({"sampling": replace(SAMPLED, stop_strings=("x",))}, "stop_strings need a tokenizer"),
        ({"samples_per_prompt": 0}, "samples_per_prompt: 0; allowed: at least 1"),
        ({"index": 1}, "prompt 1: was submitted before"),
    ],
)
def test_requests_that_could_not_run_are_refused(
    small: BuiltModel, alone: ParallelContext, changes: dict, message: str
):
    session = make_engine(small, alone, 1).open(LIMITS)
    session.submit(Prompt(prompt_ids=(1,), index=1, sampling=SAMPLED))
    with pytest.raises(UserError, match=message):
        session.submit(replace(Prompt(prompt_ids=(1, 2), index=7, sampling=SAMPLED), **changes))


def test_generate_refuses_before_it_takes_memory(small: BuiltModel, alone: ParallelContext):
    good = random_prompts(2, VOCAB, SAMPLED)
    cases = [
        (good, {"memory_gb": 1e-6}, "rollout.memory_gb"),
        (good, {"context_tokens": 10}, "rollout.context_tokens=10"),
        ([good[0], good[0]], {}, "same index"),
        ([replace(good[0], prompt_ids=(99,))], {}, "99 is no token"),
        (good, {"context_tokens": 10**6}, "exceed the model's 4096 positions"),
    ]
    for prompts, config, message in cases:
        engine = make_engine(small, alone, 0, **config)
        with pytest.raises(UserError, match=message):
            engine.generate(prompts)
        assert engine._memory is None
    assert make_engine(small, alone, 0).generate([]) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -0.1), ("temperature", float("nan")), ("top_k", 0), ("top_p", 0.0), ("max_new_tokens", 0),
     ("min_new_tokens", -1), ("seed", 2**32), ("stop_strings", ("",))],
)  # fmt: skip
def test_sampling_values_out_of_range_are_named(name: str, value: object):
    with pytest.raises(ValueError, match=f"sampling.{name}: .* is not allowed; must be"):
        SamplingParams(**{name: value})


def test_stats_count_what_is_kept():
    stats = RolloutStats(3)
    stats.add_step(n_rows=4, capacity=8, drafts=3)
    for kept, n_accepted in ((4, 3), (2, 1), (1, 0), (2, 3)):
        stats.add_row(kept, n_accepted, drafts=3)
    summary = stats.summary()
    assert summary["accept_length"] == 9 / 4
    # The last row was cut after two tokens: its third draft is not counted.
    assert summary["accept_depth"] == [3 / 4, 2 / 3, 1.0]
    assert stats.reached == [4, 3, 1] and summary["occupancy"] == 0.5
    double = stats.joined(lambda values: [2.0 * value for value in values])
    assert double.reached == [8, 6, 2] and double.steps == 2 and double.steps_by_drafts == [0, 0, 0, 2]
    assert double.summary()["accept_length"] == 9 / 4 and double.rows_by_kept == [0, 2, 4, 0, 2]
    shares = stats.shares()
    assert [shares[f"accept_share{n}"] for n in (1, 2, 3, 4)] == [1 / 4, 2 / 4, 0, 1 / 4]
    assert [shares[f"accept_depth{d}"] for d in (1, 2, 3)] == summary["accept_depth"]


def test_all_drafts_right_give_k_plus_one_tokens_a_step(small: BuiltModel, alone: ParallelContext):
    prompts = random_prompts(3, VOCAB, replace(GREEDY, max_new_tokens=17))
    full = {g.prompt.index: g.samples[0].response_ids for g in make_engine(small, alone).generate(prompts)}
    engine = make_engine(small, alone, 3, drafter=ScriptedDrafter(full, VOCAB), prefill_tokens=64)
    engine.generate(prompts)
    summary = engine.stats.summary()
    assert summary["accept_length"] == 4.0 and summary["accept_depth"] == [1.0, 1.0, 1.0]
    assert summary["steps"] == 4 and summary["tokens"] == 51


def test_a_session_takes_requests_while_it_runs(small: BuiltModel, alone: ParallelContext):
    prompts = random_prompts(5, VOCAB, SAMPLED)
    expected = responses(make_engine(small, alone, 2).generate(prompts))
    engine = make_engine(small, alone, 2)
    session, samples = engine.open(LIMITS), []
    assert isinstance(session, RolloutSession)
    for prompt in prompts:
        session.submit(prompt)
        session.step()
    while session.step():
        samples += session.take()
    samples += session.take()
    engine.close()
    assert [s.response_ids for s in sorted(samples, key=lambda s: s.prompt_index)] == expected


def test_acceptance_does_not_drift_over_500_requests(small: BuiltModel, alone: ParallelContext):
    """Eight slots serve 250 requests, then the same ones again from used memory: same tokens, same acceptance."""
    prompts = random_prompts(250, VOCAB, replace(SAMPLED, max_new_tokens=6))
    engine = make_engine(small, alone, 2, max_running=8, keep_memory=True)
    runs = []
    for _ in range(2):
        tokens = responses(engine.generate(prompts))
        runs.append((tokens, engine.stats.accepted, engine.stats.reached, engine.stats.row_steps))
    assert runs[0] == runs[1] and runs[0][2][0] > 250
    engine.release()
