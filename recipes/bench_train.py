"""Training steps on one GPU with random weights: tokens/s, model FLOP/s, peak memory, with and without the MTP loss."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from bailing_mtp.config import BenchmarkConfig, MtpConfig
from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.contracts.batch import PackedLayout, TokenBatch
from bailing_mtp.model.build import build_model, build_on_meta, count_parameters
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.training.flops import peak_flops_per_s, training_flops
from bailing_mtp.training.objective import PretrainObjective
from bailing_mtp.training.state import TrainState, build_state
from bailing_mtp.training.step import accumulate_gradients, train_step

from .bench_weights import fill_random
from .session import Source, model_settings

BYTES_PER_PARAMETER = {"adamw": 2 + 4 + 4 + 8, "adamw8bit": 2 + 4 + 2 + 2 * 4 / 256}
"""bf16 weight and fp32 gradient; then an fp32 master weight and two fp32 moments, or two 8-bit moments whose blocks of
256 have an fp32 scale each."""


@dataclass(frozen=True)
class Arm:
    """One line of the table."""

    name: str
    mtp: MtpConfig
    recompute: str
    tokens: int
    trained_share: float = 1.0
    """Share of every document, its end, that is trained on."""


@dataclass(frozen=True)
class Figure:
    mtp: str
    recompute: str
    tokens: int
    step_ms: float
    forward_backward_ms: float
    tokens_per_second: float
    """Of whole steps, the optimizer included."""
    model_tflops_per_s: float
    mfu: float | None
    peak_gib: float
    loss: float


def arms(tokens: tuple[int, ...]) -> Iterator[Arm]:
    """The first token count with every MTP loss and recompute, the others with the main ones."""
    off, joint = MtpConfig(), MtpConfig(loss_scale=0.3)
    detached, deep = MtpConfig(loss_scale=0.3, detach=True), MtpConfig(loss_scale=0.3, depth=2)
    first, *others = tokens
    yield Arm("off", off, "none", first)
    yield Arm("off, half", off, "none", first, 0.5)
    for count in others:
        yield Arm("off", off, "none", count)
    yield Arm("joint", joint, "none", first)
    yield Arm("detached, half", detached, "none", first, 0.5)
    yield Arm("joint depth 2", deep, "none", first)
    for count in others:
        yield Arm("joint", joint, "none", count)
    for recompute in ("selective", "full"):
        yield Arm("off", off, recompute, first)
        yield Arm("joint", joint, recompute, max(tokens))


def pack(arch: Architecture, tokens: int, trained_share: float) -> TokenBatch:
    """Three documents of different lengths, random ids."""
    lengths = (tokens * 3 // 8, tokens // 2, tokens - tokens * 3 // 8 - tokens // 2)
    layout = PackedLayout.build(lengths)
    ids = torch.randint(0, arch.vocab_size, (tokens,), generator=torch.Generator().manual_seed(0))
    length_T = layout.document_end_T - torch.repeat_interleave(layout.cu_seqlens[:-1], torch.tensor(lengths))
    return TokenBatch(ids, layout.position_ids_T >= (1 - trained_share) * length_T, layout)


def cut_to_memory(config: BenchmarkConfig, arch: Architecture, context: ParallelContext, memory: int) -> Architecture:
    """The same model with as many whole layer groups as leave `reserve_gb` beside weights and optimizer."""

    def with_layers(n: int) -> Architecture:
        return Architecture.from_hf(dict(arch.hf_config) | {"num_hidden_layers": n}, "model.architecture")

    if config.layers is not None:
        return with_layers(config.layers)
    settings, room = model_settings(config.model, random_source(arch)), memory - config.reserve_gb * 2**30
    each_bytes = BYTES_PER_PARAMETER[config.optim.name]
    for n in range(arch.num_layers, arch.layer_group_size, -arch.layer_group_size):
        if each_bytes * count_parameters(*build_on_meta(with_layers(n), settings, context).modules) <= room:
            return with_layers(n)
    return with_layers(arch.layer_group_size)


def random_source(arch: Architecture) -> Source:
    return Source(arch=arch, directory=None, holds_mtp=False, router_dtype=None)


def make_state(config: BenchmarkConfig, arch: Architecture, context: ParallelContext, arm: Arm) -> TrainState:
    """A model of random weights, made on the device."""
    settings = model_settings(config.model, random_source(arch), arm.recompute, expert_bias_rate=1e-3)
    built = build_model(arch, settings, context, with_mtp=arm.mtp.loss_scale is not None)
    fill_random(built.modules, torch.Generator(context.device).manual_seed(config.seed))
    return build_state(built, context, config.optim, steps=1000)


def passes(state: TrainState, batch: TokenBatch, objective: PretrainObjective) -> None:
    """Forward and backward of a microbatch."""
    accumulate_gradients(state, [batch], objective)
    for chunk in state.chunks:
        chunk.finish_grad_sync()


def timed(config: BenchmarkConfig, run: Callable[[], object]) -> float:
    """Median seconds of `run` after two runs that compile and allocate."""
    seconds = []
    for _ in range(2 + config.steps):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return statistics.median(seconds[2:])


def measure_arm(config: BenchmarkConfig, state: TrainState, arch: Architecture, arm: Arm) -> Figure:
    batch, objective = pack(arch, arm.tokens, arm.trained_share), PretrainObjective(arm.mtp)
    losses: list[float] = []
    torch.cuda.reset_peak_memory_stats()
    step_s = timed(config, lambda: losses.append(train_step(state, [batch], objective).metrics["train/lm_loss"]))
    peak_gib = torch.cuda.max_memory_allocated() / 2**30
    passes_s = timed(config, lambda: passes(state, batch, objective))
    depth = 0 if arm.mtp.loss_scale is None else arm.mtp.depth
    flops_per_s = training_flops(arch, depth, arm.mtp.detach).of([batch]) / step_s
    peak = peak_flops_per_s(torch.cuda.get_device_name())
    return Figure(
        arm.name, arm.recompute, arm.tokens, step_s * 1e3, passes_s * 1e3, arm.tokens / step_s, flops_per_s / 1e12,
        None if peak is None else flops_per_s / peak, peak_gib, losses[-1],
    )  # fmt: skip
