"""What two GPUs do together as one does alone, over NCCL. Run by tests.distributed.suite under torchrun.

A case takes (reference, scratch directory) and raises AssertionError; every rank runs it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from bailing_mtp.config import MtpConfig, OptimConfig
from bailing_mtp.contracts.samples import Prompt, Sample, SamplingParams
from bailing_mtp.kernels.reference.peer_norm import MOST_ROWS, add_rms_norm_of_parts
from bailing_mtp.kernels.triton import train
from bailing_mtp.kernels.triton.norm import add_rms_norm
from bailing_mtp.model.build import BuiltModel, build_model
from bailing_mtp.model.settings import ModelSettings
from bailing_mtp.parallel.collectives import TWO_SHOT_ELEMENTS, PeerSum, all_gather
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.rollout.engine import RolloutEngine
from bailing_mtp.rollout.graphs import CudaCapturer
from bailing_mtp.rollout.peers import PeerSums
from bailing_mtp.training.objective import PretrainObjective
from bailing_mtp.training.state import TrainState, build_state
from bailing_mtp.training.step import train_step
from bailing_mtp.weights.fresh import init_fresh
from tests.distributed import cases_checkpoint, cases_engine, cases_exchange, worlds
from tests.distributed.cases import Case, _layouts, golden, gradients, three_steps
from tests.distributed.cases_benchmark import forced_drafts
from tests.distributed.golden import MAX_DIFFERENCE, golden_batch
from tests.gpu import ladder
from tests.model.test_presets import preset
from tests.mtp import models

FP32, BF16 = torch.float32, torch.bfloat16
FAST = ModelSettings(BF16, BF16, kda="fla", experts="grouped", kernels="triton", expert_bias_rate=1e-3)
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24)
SAMPLED = SamplingParams(max_new_tokens=24, seed=3)


def _tiny(context: ParallelContext, settings: ModelSettings) -> BuiltModel:
    """The same random model in every layout."""
    arch = preset("tiny")
    built = build_model(arch, settings, context, with_mtp=True)
    init_fresh(arch, worlds.shard_of(context), built.trunk, built.mtp, seed=1)
    return built


def _prompts(n: int, *kinds: SamplingParams) -> list[Prompt]:
    """Their responses end at different times, so that several buckets take part and one replica runs dry first."""
    made = ladder.make_prompts(n, 512, kinds[0])
    return [
        dataclasses.replace(
            p, sampling=dataclasses.replace(kinds[p.index % len(kinds)], max_new_tokens=4 + 5 * p.index % 21)
        )
        for p in made
    ]


def _samples(engine: RolloutEngine, prompts: Sequence[Prompt], step: int = 0) -> list[Sample]:
    return [sample for group in engine.generate(prompts, step) for sample in group.samples]


def _numbers(engine: RolloutEngine, prompts: Sequence[Prompt], step: int = 0) -> list[tuple[object, ...]]:
    """What must be equal bit for bit."""
    return [(sample.response_ids, sample.logprobs, sample.finish_reason) for sample in _samples(engine, prompts, step)]


def golden_by_decoding(reference: worlds.Reference, scratch: Path, tp: int, ep: int) -> None:
    """fp32 logits of the fixture, decoded one and three tokens at a time by the Triton kernels."""
    batch, expected = golden_batch("moe")
    documents = batch.input_ids_T.split(batch.layout.lengths)
    with worlds.layout(tp, ep) as context:
        for S in (1, 3):
            rig = ladder.Rig.make(worlds.fixture_model("moe", context), context, "triton", len(documents), 256)
            difference = float((rig.decode(documents, S) - expected["logits_fp32"]).abs().max())
            assert difference <= MAX_DIFFERENCE, f"{S} at a time: logits differ by {difference}"


def greedy_rollouts(
    reference: worlds.Reference, scratch: Path, tp: int, ep: int, tp_sum: str = "library"
) -> None:
    """In fp32, from CUDA graphs, plain and with drafts: the plain tokens of one GPU."""
    prompts, found = _prompts(11, GREEDY), {}
    for layout in ((1, 1), (tp, ep)):
        with worlds.layout(*layout) as context:
            built = _tiny(context, ModelSettings(FP32, FP32))
            for k in (0, 2):
                engine = ladder.make_engine(built, context, k, max_running=8, tp_sum=tp_sum)
                found[layout, k] = [sample.response_ids for sample in _samples(engine, prompts)]
                assert len(engine._steps.graphs) > 1
                engine.release()
    assert all(tokens == found[(1, 1), 0] for tokens in found.values())


def peer_sums(reference: worlds.Reference, scratch: Path, tp: int, ep: int) -> None:
    """Sums over peer memory of every size and way, one after another in one room and by a graph, and whole rollouts."""
    sizes = (8, 1536, 1001, TWO_SHOT_ELEMENTS - 8, TWO_SHOT_ELEMENTS, 2 * TWO_SHOT_ELEMENTS + 24, 4 * TWO_SHOT_ELEMENTS)
    for dtype in (BF16, FP32):
        with worlds.layout(tp, ep) as context:
            graphs = context.for_graphs
            peers = PeerSum(graphs.tp_group, 3 * TWO_SHOT_ELEMENTS, dtype, context.device)
            generator = torch.Generator(context.device).manual_seed(context.rank)
            parts = [torch.randn(n, generator=generator, device=context.device).to(dtype) for n in sizes] * 3
            wide = [part.clone() for part in parts]
            for part in wide:
                dist.all_reduce(part, group=context.tp_group)
            found: list[torch.Tensor] = []

            def sums(found: list[torch.Tensor] = found, parts: list[torch.Tensor] = parts, peers: PeerSum = peers):
                found[:] = [peers(part.clone().view(1, -1)) for part in parts]

            capturer = CudaCapturer(context.device)
            capturer.warm_up(sums)
            eager = [total.clone() for total in found]
            graph = capturer.capture(sums)
            for _ in range(3):
                graph.replay()
            torch.cuda.synchronize()
            for expected, once, replayed in zip(wide, eager, found, strict=True):
                assert once.shape == (1, len(expected))
                # Of two values each order of adding gives the same.
                assert torch.equal(once[0], expected) and torch.equal(replayed, once)
            del graph, found[:]
            capturer.release()
    greedy_rollouts(reference, scratch, tp, ep, tp_sum="peer")


def peer_norms(reference: worlds.Reference, scratch: Path, tp: int, ep: int) -> None:
    """Sum, residual and norm in one launch: bit for bit the group's sum and the norm's own kernel, whatever row counts
    follow one another, past the mailboxes' rows too; by graphs and eager calls in turn, in rooms made again."""
    rows, H = (1, 40, 3, 200, MOST_ROWS, MOST_ROWS + 7, 1, 17), 1536
    for dtype in (BF16, FP32):
        with worlds.layout(tp, ep) as context:
            device = context.device
            own = torch.Generator(device).manual_seed(context.rank)
            common = torch.Generator(device).manual_seed(7)
            weight_H = torch.rand(H, generator=common, device=device).to(dtype)
            xs = [torch.randn(n, H, generator=common, device=device).to(dtype) for n in rows]
            parts = [torch.randn(n, H, generator=own, device=device).to(dtype) for n in rows]
            gathered = [all_gather(part, context.tp_group) for part in parts]
            expected = [add_rms_norm(x, whole.sum(0), weight_H, 1e-6) for x, whole in zip(xs, gathered, strict=True)]
            for x, whole, pair in zip(xs, gathered, expected, strict=True):
                for ours, twins in zip(pair, add_rms_norm_of_parts(x, whole, weight_H, 1e-6), strict=True):
                    torch.testing.assert_close(ours, twins, atol=1e-5, rtol=1.6e-2 if dtype is BF16 else 1e-5)
            for _ in range(2):
                peers = PeerSums.make(context.for_graphs.tp_group, max(rows), H, dtype, device)
                _check_norms(peers, tuple(zip(xs, parts, strict=True)), weight_H, expected)


def _check_norms(
    peers: PeerSums,
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    weight_H: torch.Tensor,
    expected: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> None:
    found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def norms() -> None:
        found[:] = [peers.add_rms_norm(x, part.clone(), weight_H, 1e-6) for x, part in pairs]

    def check(results: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        torch.cuda.synchronize()
        for ours, theirs in zip(results, expected, strict=True):
            assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])

    capturer = CudaCapturer(weight_H.device)
    capturer.warm_up(norms)
    check(found)
    graph = capturer.capture(norms)
    captured = list(found)
    for _ in range(5):
        for pair in captured:
            pair[0].zero_(), pair[1].zero_()
        graph.replay()
        check(captured)
        norms()
        check(found)
    del graph, captured, found[:]
    capturer.release()


def graph_is_eager(reference: worlds.Reference, scratch: Path, tp: int, ep: int) -> None:
    """Tokens and log-probabilities bit for bit, with every set of rules, collectives inside the graph."""
    kinds = ((SAMPLED,), (SAMPLED, GREEDY), (dataclasses.replace(SAMPLED, top_p=0.8),))
    with worlds.layout(tp, ep) as context:
        built = _tiny(context, ModelSettings(BF16, BF16))
        for k in (0, 2):
            graphed = ladder.make_engine(built, context, k, max_running=8)
            eager = ladder.make_engine(built, context, k, max_running=8, cuda_graphs=False)
            for step, sampled in enumerate(kinds):
                prompts = _prompts(11, *sampled)
                assert _numbers(graphed, prompts, step) == _numbers(eager, prompts, step), (k, step)
            graphed.release(), eager.release()


def _state(context: ParallelContext, settings: ModelSettings) -> TrainState:
    return build_state(_tiny(context, settings), context, OptimConfig(lr=1e-3), 50)


def fast_training(reference: worlds.Reference, scratch: Path, tp: int, ep: int) -> None:
    """Six bf16 steps with the GPU's kernels, two microbatches each: losses and norms of a run without any split."""
    batches, found = [models.pack((200, 57), vocab=64, seed=seed) for seed in range(12)], []
    objective = PretrainObjective(MtpConfig(loss_scale=0.3, depth=2))
    for layout in ((1, 1), (tp, ep)):
        with worlds.layout(*layout) as context:
            state = _state(context, FAST)
            pairs = [batches[i : i + 2][context.dp_rank :: context.dp] for i in range(0, 12, 2)]
            found.append([train_step(state, mine, objective).metrics for mine in pairs])
    for step, (whole, split) in enumerate(zip(*found, strict=True)):
        for name in ("train/lm_loss", "mtp/loss_depth2", "train/grad_norm"):
            error = abs(split[name] - whole[name]) / whole[name]
            assert error <= (0.1 if "norm" in name else 0.02), f"step {step}: {name} {split[name]} and {whole[name]}"


def exchange_never_waits_for_all(reference: worlds.Reference, scratch: Path, tp: int, ep: int) -> None:
    """Sizes come to the host by an event, and never by a copy that waits for all that the device has queued."""
    batch, objective = models.pack((200, 56), vocab=64), PretrainObjective(MtpConfig(loss_scale=0.3))
    for recompute in ("none", "selective", "full"):
        with worlds.layout(tp, ep) as context:
            state = _state(context, dataclasses.replace(FAST, recompute=recompute))
            counts, on_device = objective.count(batch), batch.to(context.device)
            for run in range(3):
                torch.cuda.synchronize()
                # Once everything is compiled.
                torch.cuda.set_sync_debug_mode("error" if run == 2 else "default")
                try:
                    with state.trunk.no_sync(), state.mtp.no_sync():
                        objective(state, on_device, counts).total.backward()
                finally:
                    torch.cuda.set_sync_debug_mode("default")


def graphs_follow_the_weights(reference: worlds.Reference, scratch: Path, tp: int, ep: int) -> None:
    """After a training step the kept graphs give the tokens of eager steps on the new weights."""
    batch, prompts = models.pack((200, 56), vocab=64), _prompts(8, SAMPLED)
    objective = PretrainObjective(MtpConfig(loss_scale=0.3))
    with worlds.layout(tp, ep) as context:
        state = _state(context, FAST)
        built = BuiltModel(state.trunk_module, state.mtp_module)
        kept = ladder.make_engine(built, context, 2, clock=state.clock)
        before = _numbers(kept, prompts)
        for _ in range(2):
            train_step(state, [batch], objective)
        after = _numbers(kept, prompts)
        eager = ladder.make_engine(built, context, 2, clock=state.clock, cuda_graphs=False)
        assert after == _numbers(eager, prompts) != before
        kept.release(), eager.release()


SPLITS = ((2, 2), (1, 2), (2, 1))
CASES: dict[int, dict[str, Case]] = {
    2: {
        **_layouts(golden, *SPLITS),
        **_layouts(gradients, *SPLITS),
        **_layouts(three_steps, (2, 2), (1, 2)),
        **_layouts(golden_by_decoding, *SPLITS),
        **_layouts(greedy_rollouts, *SPLITS),
        **_layouts(graph_is_eager, (2, 2), (1, 2)),
        **_layouts(fast_training, (2, 2), (1, 2)),
        **_layouts(graphs_follow_the_weights, (2, 2)),
        **_layouts(forced_drafts, (2, 2)),
        **_layouts(cases_engine.engine, (2, 2), (1, 2)),
        "engine_disagreement": cases_engine.engine_disagreement,
        "reshard": functools.partial(cases_checkpoint.reshard, tolerance=1e-5),
        "peer_sums": functools.partial(peer_sums, tp=2, ep=2),
        "a_row_for_each_rank": cases_exchange.a_row_for_each_rank,
        "exchanged": functools.partial(
            cases_exchange.exchanged, kernels=train, dtype=BF16, limit=None, tolerance=0.02
        ),
        **_layouts(exchange_never_waits_for_all, (1, 2), (2, 2)),
        "peer_norms": functools.partial(peer_norms, tp=2, ep=2),
    }
}
