"""Small models, batches and reference results shared by the single-process and the multi-process tests."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bailing_mtp.config import MtpConfig, OptimConfig
from bailing_mtp.contracts.batch import PackedLayout, TokenBatch
from bailing_mtp.model.build import BuiltModel, build_model
from bailing_mtp.model.settings import ModelSettings
from bailing_mtp.parallel.context import ParallelContext, build_context, destroy_context
from bailing_mtp.training.objective import PretrainObjective
from bailing_mtp.training.state import DdpOptions, TrainState, build_state
from bailing_mtp.training.step import accumulate_gradients, train_step
from bailing_mtp.training.update import finish_gradients
from bailing_mtp.weights.load import load_hf, read_architecture
from bailing_mtp.weights.local_tensors import local_tensors, piece_view
from bailing_mtp.weights.names import ParamMaps, Shard, mtp_map, trunk_map

TIMEOUT_S = 60.0
FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "bailing_v3"
FP32 = ModelSettings(torch.float32, torch.float32, expert_bias_rate=1e-3)
GROUPED = replace(FP32, experts="grouped")
# eps well above the rounding differences of tiny gradients, which Adam would otherwise turn into whole steps.
OPTIM = OptimConfig(lr=1e-3, schedule="constant", eps=1e-5, clip_grad=1.0)
EIGHT_BITS = OPTIM.model_copy(update={"name": "adamw8bit"})
OBJECTIVE = PretrainObjective(MtpConfig(loss_scale=0.3), chunk_tokens=96)
CHAIN = PretrainObjective(MtpConfig(loss_scale=0.3, objective="soft", depth=2), chunk_tokens=48)
# Several buckets per chunk, so that the overlapped reduction really has an order to get wrong.
SMALL_BUCKETS = DdpOptions(overlap_grad_reduce=True, bucket_elements=50_000)


@contextlib.contextmanager
def layout(tp: int, ep: int) -> Iterator[ParallelContext]:
    """Process groups of one layout, forgotten afterwards; on this rank's GPU where there is one."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    context = build_context(tp, ep, seed=0, device_type=device_type, local_rank=local_rank, timeout_s=TIMEOUT_S)
    try:
        yield context
    finally:
        destroy_context()


def shard_of(context: ParallelContext) -> Shard:
    return Shard(context.tp, context.tp_rank, context.ep, context.ep_rank)


def fixture_model(kind: str, context: ParallelContext, settings: ModelSettings = FP32) -> BuiltModel:
    """The golden fixture's weights in this layout, MTP layer included."""
    arch = read_architecture(FIXTURES / kind)
    built = build_model(arch, settings, context, with_mtp=True)
    load_hf(FIXTURES / kind, arch, shard_of(context), built.trunk, built.mtp)
    return built


def microbatches(n: int = 4, lengths: tuple[int, ...] = (37, 60, 30), vocab: int = 512) -> list[TokenBatch]:
    """Random packs of an odd number of tokens with a loss mask that is not all ones."""
    generator = torch.Generator().manual_seed(1)
    packed = PackedLayout.build(lengths)
    batches = []
    for _ in range(n):
        ids = torch.randint(0, vocab, (packed.n_tokens,), generator=generator)
        mask = torch.rand(packed.n_tokens, generator=generator) > 0.2
        batches.append(TokenBatch(ids, mask, packed))
    return batches


def uneven_microbatches() -> list[TokenBatch]:
    """Packs with very different numbers of sites: answers alone, all but holes, next to none, none."""
    lengths = ((37, 60, 30), (5, 9, 2), (3, 3), (40, 1, 2))
    packs = [microbatches(1, lengths=pack)[0] for pack in lengths]
    answers_T = packs[0].loss_mask_T & (packs[0].layout.position_ids_T >= 20)
    nothing_T = torch.zeros_like(packs[3].loss_mask_T)
    return [replace(packs[0], loss_mask_T=answers_T), *packs[1:3], replace(packs[3], loss_mask_T=nothing_T)]


def maps_of(built: BuiltModel, shard: Shard) -> list[tuple[nn.Module, ParamMaps]]:
    arch = built.trunk.arch
    return [(built.trunk, trunk_map(arch, shard)), (built.mtp, mtp_map(arch, shard))]


def whole_tensors(built: BuiltModel, pick: str) -> dict[str, Tensor]:
    """HF name -> whole tensor of a single-process model; pick: "weight" or "grad"."""
    whole = {}
    for module, maps in maps_of(built, Shard()):
        for name, local in _picked(module, maps, pick).items():
            for piece in maps[name].pieces:
                whole[piece.hf_name] = piece_view(local, piece).reshape(piece.hf_shape).cpu().clone()
    return whole


def largest_difference(
    built: BuiltModel, context: ParallelContext, whole: dict[str, Tensor], pick: str
) -> tuple[float, str]:
    """Largest |this rank's shard - the same part of the whole|, and the tensor where it is."""
    worst = (0.0, "")
    for module, maps in maps_of(built, shard_of(context)):
        for name, local in _picked(module, maps, pick).items():
            for piece in maps[name].pieces:
                dim, start, stop = piece.held
                expected = whole[piece.hf_name].narrow(dim, start, stop - start)
                found = piece_view(local, piece).reshape(expected.shape).cpu()
                worst = max(worst, (float((found - expected).abs().max()), piece.hf_name))
    return worst


def _picked(module: nn.Module, maps: ParamMaps, pick: str) -> dict[str, Tensor]:
    tensors = local_tensors(module, maps)
    if pick == "weight":
        return tensors
    parameters = dict(module.named_parameters())
    return {name: parameters[name].main_grad for name in tensors if name in parameters}


@dataclass(frozen=True)
class Reference:
    """What one process computes: gradients of the first step, weights and metrics after three; gradients, router
    counts and metrics of one step with two soft MTP depths."""

    grads: dict[str, Tensor]
    weights: dict[str, Tensor]
    metrics: list[dict[str, float]]
    chain_grads: dict[str, Tensor]
    chain_routed: dict[str, Tensor]
    chain_metrics: dict[str, float]


def gradients(
    state: TrainState, batches: list[TokenBatch], objective: PretrainObjective = OBJECTIVE
) -> dict[str, Tensor]:
    """Whole gradients of one step in every rank's buffers (all-reduced instead of scattered).

    Returns this rank's tokens per expert, by router.
    """
    accumulate_gradients(state, batches, objective)
    routed = {
        f"{index}.{name}": buffer.clone()
        for index, chunk in enumerate(state.chunks)
        for name, buffer in chunk.module.named_buffers()
        if name.endswith("local_tokens_per_expert")
    }
    finish_gradients(state, reduce_whole=True)
    return routed


def chain_state(reference: Reference, built: BuiltModel, context: ParallelContext) -> TrainState:
    """After the gradients of two joint soft depths on microbatches of very different site counts, which, and the router
    counts, are those of one process."""
    state = build_state(built, context, OPTIM, 10, DdpOptions(overlap_grad_reduce=False))
    routed = gradients(state, uneven_microbatches()[context.dp_rank :: context.dp], CHAIN)
    worst = largest_difference(built, context, reference.chain_grads, "grad")
    assert worst[0] <= 1e-4, f"gradient of {worst[1]} differs by {worst[0]}"
    for name, counts in routed.items():
        dist.all_reduce(counts)
        assert torch.equal(counts.cpu(), reference.chain_routed[name]), name
    return state


def three_steps(state: TrainState, batches: list[TokenBatch]) -> list[dict[str, float]]:
    return [train_step(state, batches, OBJECTIVE).metrics for _ in range(3)]


def reference(context: ParallelContext) -> Reference:
    """Computed on one process; the multi-process cases compare with it."""
    built = fixture_model("moe", context)
    state = build_state(built, context, OPTIM, steps=10, ddp=DdpOptions(overlap_grad_reduce=False))
    gradients(state, microbatches())
    grads = whole_tensors(built, "grad")
    built = fixture_model("moe", context)
    state = build_state(built, context, OPTIM, steps=10, ddp=DdpOptions(overlap_grad_reduce=False))
    routed = gradients(state, uneven_microbatches(), CHAIN)
    chain_grads = whole_tensors(built, "grad")
    state = build_state(fixture_model("moe", context), context, OPTIM, steps=10)
    chain_metrics = train_step(state, uneven_microbatches(), CHAIN).metrics
    built = fixture_model("moe", context)
    state = build_state(built, context, OPTIM, steps=10)
    metrics = three_steps(state, microbatches())
    return Reference(grads, whole_tensors(built, "weight"), metrics, chain_grads, routed, chain_metrics)
