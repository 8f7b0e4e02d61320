"""Which graphs are captured, when they are dropped, and what a capture without memory ends with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bailing_mtp.contracts.samples import SamplingParams
from bailing_mtp.errors import UserError
from bailing_mtp.model.build import BuiltModel
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.rollout.distribution import StepRules
from bailing_mtp.rollout.engine import RolloutEngine
from bailing_mtp.rollout.graphs import StepGraphs, StepShape
from bailing_mtp.rollout.lockstep import Lockstep, bucket, buckets
from tests.rollout.engine_rig import make_engine, random_prompts, responses

VOCAB = 24
SAMPLED = SamplingParams(temperature=1.0, max_new_tokens=9, seed=3)


class Recorded:
    def __init__(self, body) -> None:
        self.replay = body


class FakeCapturer:
    """Replays by running the body again, which must read all that changes from where it stays."""

    def __init__(self, device: torch.device | None = None, fail_at: str = "") -> None:
        self.fail_at, self.captured, self.warmed, self.released = fail_at, 0, 0, 0

    def warm_up(self, body) -> None:
        self.warmed += 1
        if self.fail_at == "warm up":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        body()

    def capture(self, body) -> Recorded:
        if self.fail_at == "end of capture":
            try:
                raise torch.OutOfMemoryError("CUDA out of memory")
            except torch.OutOfMemoryError as error:
                raise RuntimeError("operation failed due to a previous error during capture") from error
        if self.fail_at == "bug":
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captured += 1
        return Recorded(body)

    def pool_bytes(self) -> int:
        return self.captured << 20

    def release(self) -> None:
        self.released += 1


def graphed(
    built: BuiltModel, context: ParallelContext, k: int, capturer: FakeCapturer, **config: object
) -> tuple[RolloutEngine, list[str]]:
    told: list[str] = []
    options = {"max_running": 6, "keep_memory": True, "context_tokens": 40, "cuda_graphs": True} | config
    engine = make_engine(built, context, k, **options)
    engine._make_capturer, engine._tell = lambda device: capturer, told.append
    return engine, told


@pytest.mark.parametrize("k", [0, 2])
def test_one_graph_for_each_bucket_and_only_the_configured_drafts(small: BuiltModel, alone: ParallelContext, k: int):
    prompts = random_prompts(9, VOCAB, SAMPLED, samples=2)
    capturer = FakeCapturer()
    engine, told = graphed(small, alone, k, capturer)
    found = responses(engine.generate(prompts))
    assert found == responses(make_engine(small, alone, k, context_tokens=40).generate(prompts))
    shapes = list(engine._steps.graphs._graphs)
    assert {shape.drafts for shape in shapes} == {k} and len({shape.rules for shape in shapes}) == 1
    assert {shape.rows for shape in shapes} <= set(buckets(6)) == {1, 2, 4, 8}
    assert capturer.captured == capturer.warmed == len(shapes) >= 3
    assert told[0] == f"rollout: capturing CUDA graph 1 of at most 4 ({shapes[0].rows} rows, {k} drafts)"
    assert told[1].endswith("all graphs hold 0.00 GiB") and "captured in" in told[1]
    held_bytes = sum(tensor.nbytes for tensor in engine._memory.tensors())
    assert engine.memory_bytes == held_bytes + (capturer.captured << 20)
    # Another rollout and other noise: the graphs stay, and so do all addresses that they hold.
    addresses = [tensor.data_ptr() for tensor in engine._memory.tensors()]
    again = responses(engine.generate(prompts, rollout_step=1))
    assert capturer.captured == len(shapes) and again != found
    assert addresses == [tensor.data_ptr() for tensor in engine._memory.tensors()]
    # A program is made anew for each rollout, so that it may own no tensor.
    program = engine._steps._program
    parts = (program, program.compute, program.delta, program.latent)
    assert not [name for part in parts for name, value in vars(part).items() if isinstance(value, torch.Tensor)]
    assert again == responses(make_engine(small, alone, k, context_tokens=40).generate(prompts, rollout_step=1))


def test_a_capture_changes_no_sequence(small: BuiltModel, alone: ParallelContext):
    """The warm-up names the scratch slot alone, also when it comes in the middle of a rollout."""
    engine, _ = graphed(small, alone, 2, FakeCapturer())
    graphs: list = []
    capture = StepGraphs.capture

    def watch(self, shape, body):
        memory, last = engine._memory, engine._memory.scratch_slot
        before = [by_slot[:last].clone() for by_slot in (*memory.kda.by_slot(), *vars(memory.slots).values())]
        latents = memory.latents_LBbx[:, : memory.scratch_block].clone()
        capture(self, shape, body)
        after = [by_slot[:last] for by_slot in (*memory.kda.by_slot(), *vars(memory.slots).values())]
        assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
        assert torch.equal(latents, memory.latents_LBbx[:, : memory.scratch_block])
        graphs.append(int(memory.slots.generated[:last].max()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepGraphs, "capture", watch)
        engine.generate(random_prompts(6, VOCAB, SAMPLED))
    assert max(graphs) > 1


def test_other_rules_are_other_graphs(small: BuiltModel, alone: ParallelContext):
    capturer = FakeCapturer()
    engine, _ = graphed(small, alone, 1, capturer)
    prompts = random_prompts(2, VOCAB, SAMPLED)
    engine.generate(prompts)
    plain = capturer.captured
    engine.generate([replace(p, sampling=replace(SAMPLED, top_p=0.5)) for p in prompts])
    assert capturer.captured > plain
    assert {shape.rules for shape in engine._steps.graphs._graphs} == {StepRules(), StepRules(truncates=True)}


def test_graphs_end_with_the_memory_and_with_weights_that_move(small: BuiltModel, alone: ParallelContext):
    capturer = FakeCapturer()
    engine, told = graphed(small, alone, 1, capturer)
    prompts = random_prompts(2, VOCAB, SAMPLED)
    engine.generate(prompts)
    once, weight = capturer.captured, next(small.trunk.parameters())
    with torch.no_grad():
        weight.mul_(1.0)
    engine.generate(prompts)
    assert capturer.captured == once and capturer.released == 0
    original = weight.data
    weight.data = original.clone()
    engine.generate(prompts)
    assert capturer.captured == 2 * once and capturer.released == 1
    assert any("weights have moved" in line for line in told)
    weight.data = original
    engine.release()
    assert capturer.released == 2 and engine._steps is None and engine.memory_bytes == 0
    passing, _ = graphed(small, alone, 1, FakeCapturer(), keep_memory=False)
    passing.generate(prompts)
    assert passing._steps is None


@pytest.mark.parametrize("fail_at", ["warm up", "end of capture"])
def test_a_capture_without_memory_ends_with_advice(small: BuiltModel, alone: ParallelContext, fail_at: str):
    engine, _ = graphed(small, alone, 1, FakeCapturer(fail_at=fail_at), keep_memory=False)
    with pytest.raises(UserError) as caught:
        engine.generate(random_prompts(2, VOCAB, SAMPLED))
    for key in ("rollout.cuda_graphs", "rollout.memory_gb", "rollout.max_running"):
        assert key in str(caught.value)
    assert "no memory is left to capture the graph of a step of 1 rows, 1 drafts" in str(caught.value)
    assert engine._memory is None


def test_a_capture_that_fails_on_another_rank_ends_here_too():
    graphs = StepGraphs(FakeCapturer(), lambda flag: True, 4, lambda text: None)
    with pytest.raises(UserError, match="another rank failed, or has no memory left"):
        graphs.capture(StepShape(4, 2, StepRules()), lambda: None)
    assert len(graphs) == 0


def test_other_failures_of_a_capture_stay_what_they_are(small: BuiltModel, alone: ParallelContext):
    engine, _ = graphed(small, alone, 1, FakeCapturer(fail_at="bug"))
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        engine.generate(random_prompts(2, VOCAB, SAMPLED))


def test_buckets_are_the_sizes_of_steps(alone: ParallelContext):
    assert buckets(70) == (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96)
    assert all(bucket(size) == size for size in buckets(300))
    assert Lockstep(alone).any_rank(True) and not Lockstep(alone).any_rank(False)
