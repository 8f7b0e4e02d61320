"""Whole rollouts against the bytes they must move: python -m recipes.benchmark what=decode

n rows of a step, k drafts, S = k + 1.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.distributed as dist

from bailing_mtp.config import BenchmarkConfig
from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.kernels.triton import decode
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.rollout.compute import ExpertLayout
from bailing_mtp.rollout.lockstep import bucket
from bailing_mtp.weights.view import WeightsView

from .bench_case import Draw, Workload
from .bench_decode_figures import DecodeFailure, DecodeFigure
from .bench_floors import Floors, floor_us
from .bench_kernels import kernel_cases
from .bench_rollout import TimedRollouts
from .bench_step_bytes import StepBytes, touched_experts
from .bench_weights import random_view


def measure_decode(
    config: BenchmarkConfig,
    arch: Architecture,
    draw: Draw,
    context: ParallelContext,
    show: Callable[[DecodeFigure | DecodeFailure], None],
) -> list[DecodeFigure | DecodeFailure]:
    """A figure for every shape, or a failure where a kernel is not its twin at that shape."""
    results: list[DecodeFigure | DecodeFailure] = []
    checked: dict[tuple[int, int], DecodeFailure | None] = {}
    for routing in config.routing:
        view = random_view(arch, draw, context.tp, context.ep, routing == "skewed")
        for n, prompt_tokens in itertools.product(config.rows, config.prompt_tokens):
            plain: dict[float, DecodeFigure] = {}
            for k in config.drafts:
                if (n, k) not in checked:
                    checked[n, k] = _on_any_rank(_differing(_of_one_rank(arch, context), draw, n, k), context)
                failure = checked[n, k]
                if failure is not None:
                    found: Iterator[DecodeFigure | DecodeFailure] = iter([failure])
                else:
                    found = _one_size(config, view, context, routing, n, k, prompt_tokens, plain)
                for result in found:
                    show(result)
                    results.append(result)
        del view
    return results


def _of_one_rank(arch: Architecture, context: ParallelContext) -> Architecture:
    """Sizes that a rank's kernels meet; experts are checked whole."""
    tp, shared = context.tp, arch.shared_intermediate_size
    return replace(
        arch,
        num_heads=arch.num_heads // tp,
        vocab_size=arch.vocab_size // tp,
        intermediate_size=arch.intermediate_size // tp,
        shared_intermediate_size=None if shared is None else shared // tp,
    )


def _on_any_rank(failure: DecodeFailure | None, context: ParallelContext) -> DecodeFailure | None:
    """The first rank's failure, on every rank: all of them measure a shape, or none does. Collective."""
    everyone: list[DecodeFailure | None] = [failure]
    if context.world_size > 1:
        everyone = [None] * context.world_size
        dist.all_gather_object(everyone, failure)
    return next((found for found in everyone if found is not None), None)


def _differing(arch: Architecture, draw: Draw, n: int, k: int) -> DecodeFailure | None:
    """The first kernel that is not its twin at this shape."""
    load = Workload(arch, Floors(arch, draw.dtype.itemsize), decode, context_tokens=256)
    for case in kernel_cases(load, (n,), (k + 1,)):
        call = case.make(draw)
        error = call.error()
        if not error <= call.tolerance:
            return DecodeFailure(n, k, case.kernel, error, call.tolerance)
    torch.cuda.empty_cache()
    return None


def _one_size(
    config: BenchmarkConfig,
    view: WeightsView,
    context: ParallelContext,
    routing: str,
    n: int,
    k: int,
    prompt_tokens: int,
    plain: dict[float, DecodeFigure],
) -> Iterator[DecodeFigure]:
    """Every temperature and acceptance of one number of rows and drafts; `plain` keeps those without drafts."""
    rollouts = TimedRollouts(
        view, context, n, k, prompt_tokens, config.new_tokens, tp_sum=config.tp_sum
    )
    touched = touched_experts(view, context, rollouts.short_prompts(1.0, config.new_tokens), k, decode)
    reach_tokens = prompt_tokens + config.new_tokens // 2
    n_bytes = StepBytes(view, ExpertLayout.of(context).slices).step(n, k, reach_tokens, touched)
    floor_ms = floor_us(n_bytes, config.copy_tb_per_s) / 1e3
    for temperature in config.temperatures:
        for acceptance in config.acceptance if k and temperature > 0 else ("own",):
            timing = rollouts.run(temperature, acceptance)
            base = plain.get(temperature)
            tokens_per_second = context.dp * n * timing.accept_length / timing.step_ms * 1e3
            figure = DecodeFigure(
                rows=n,
                drafts=k,
                temperature=temperature,
                prompt_tokens=prompt_tokens,
                routing=routing,
                acceptance=acceptance,
                step_ms=timing.step_ms,
                slow_step_ms=timing.slow_step_ms,
                host_gap=1 - timing.graph_ms / timing.step_ms,
                accept_length=timing.accept_length,
                tokens_per_second=tokens_per_second,
                speed_up=tokens_per_second / base.tokens_per_second if base else 1.0,
                break_even=timing.step_ms / base.step_ms if base else 1.0,
                expected_break_even=floor_ms / base.floor_ms if base else 1.0,
                floor_ms=floor_ms,
                ratio=timing.step_ms / floor_ms,
                experts_touched=touched.mean,
                padded_rows=bucket(n),
                row_mb=timing.row_bytes / 1e6,
                memory_gb=timing.memory_bytes / 2**30,
                free_gb=timing.free_bytes / 2**30,
            )
            if not k:
                plain[temperature] = figure
            yield figure
    rollouts.engine.release()
    torch.cuda.empty_cache()
