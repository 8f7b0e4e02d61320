"""Training steps with random weights: tokens/s, model FLOP/s, peak memory, with and without the MTP loss."""

import gc
import statistics
from collections.abc import Callable

import torch

from bailing_mtp.config import BenchmarkConfig
from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.contracts.batch import TokenBatch
from bailing_mtp.model.build import build_model
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.training.flops import peak_flops_per_s, training_flops
from bailing_mtp.training.objective import PretrainObjective
from bailing_mtp.training.state import TrainState, build_state
from bailing_mtp.training.step import accumulate_gradients, train_step

from .bench_train_arms import Arm, Figure, pack
from .bench_train_size import random_source
from .bench_weights import fill_random
from .session import model_settings

SCHEDULE_STEPS = 1000
"""Of the learning rate's schedule, beside the config's warm-up and decay. Not how many are run: that depends on which
arms share a state, and of all figures only the last digits of the loss depend on the rate."""


def make_state(config: BenchmarkConfig, arch: Architecture, context: ParallelContext, arm: Arm) -> TrainState:
    """A model of random weights, made on the device."""
    optim = config.optim
    settings = model_settings(
        config.model, random_source(arch), arm.recompute, optim.expert_bias_rate, optim.fused == "apex"
    )
    built = build_model(arch, settings, context, with_mtp=arm.mtp.loss_scale is not None)
    fill_random(built.modules, torch.Generator(context.device).manual_seed(config.seed))
    return build_state(built, context, optim, optim.warmup_steps + (optim.decay_steps or 0) + SCHEDULE_STEPS)


class States:
    """One model at a time, kept for as long as arms can share it."""

    def __init__(self, config: BenchmarkConfig, arch: Architecture, context: ParallelContext) -> None:
        self._make = lambda arm: make_state(config, arch, context, arm)
        self._kept: TrainState | None = None
        self._built_for: tuple[bool, str] | None = None

    def get(self, arm: Arm) -> TrainState:
        wanted = (arm.mtp.loss_scale is None, arm.recompute)
        if self._kept is None or wanted != self._built_for:
            self.forget()  # freed before the next one is made
            self._kept, self._built_for = self._make(arm), wanted
        return self._kept

    def forget(self) -> None:
        self._kept = None
        gc.collect()
        torch.cuda.empty_cache()


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
    before_bytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    passes_s = timed(config, lambda: passes(state, batch, objective))
    activation_gib = (torch.cuda.max_memory_allocated() - before_bytes) / 2**30
    depth = 0 if arm.mtp.loss_scale is None else arm.mtp.depth
    context = state.context
    tokens_per_second = context.dp * arm.tokens / step_s
    flops_per_s = training_flops(arch, depth, arm.mtp.detach).of([batch]) / context.tp / step_s
    peak = peak_flops_per_s(torch.cuda.get_device_name())
    return Figure(
        arm.name, arm.recompute, arm.tokens, step_s * 1e3, passes_s * 1e3, tokens_per_second, flops_per_s / 1e12,
        None if peak is None else flops_per_s / peak, peak_gib, activation_gib, losses[-1],
    )  # fmt: skip
