"""Each Triton decode kernel at each shape: compared with its twin, then timed against its bytes."""

from collections.abc import Callable, Sequence

from .bench_attention import attention_cases
from .bench_case import Case, Draw, Workload
from .bench_figures import KernelFailure, KernelFigure
from .bench_floors import floor_us
from .bench_fused import fused_cases
from .bench_mlp import mlp_cases
from .bench_sampling import sampling_cases
from .bench_timing import Timer, in_turn, sets_of_inputs


def kernel_cases(load: Workload, rows: Sequence[int], fed_tokens: Sequence[int]) -> list[Case]:
    """Every kernel at every shape, kernel by kernel."""
    cases = [
        case
        for family in (attention_cases, fused_cases, mlp_cases, sampling_cases)
        for S in fed_tokens
        for n in rows
        for case in family(load, n, S)
    ]
    first_seen = {name: place for place, name in enumerate(dict.fromkeys(case.kernel for case in cases))}
    return sorted(cases, key=lambda case: first_seen[case.kernel])


def measure_kernels(
    cases: Sequence[Case],
    draw: Draw,
    timer: Timer,
    copy_tb_per_s: float,
    show: Callable[[KernelFigure | KernelFailure], None],
) -> list[KernelFigure | KernelFailure]:
    """A figure for each case, or a failure where the kernel is not its twin; `show` gets each as it comes."""
    results = []
    for case in cases:
        result = _measure(case, draw, timer, copy_tb_per_s)
        show(result)
        results.append(result)
    return results


def _measure(case: Case, draw: Draw, timer: Timer, copy_tb_per_s: float) -> KernelFigure | KernelFailure:
    calls = [case.make(draw)]
    error, allowed = calls[0].error(), calls[0].tolerance
    shape = (case.kernel, case.rows, case.fed_tokens)
    if not error <= allowed:
        return KernelFailure(*shape, error=error, allowed=allowed)
    calls += [case.make(draw) for _ in range(sets_of_inputs(calls[0].floor_bytes) - 1)]
    in_order = in_turn(calls)
    us = timer([call.run for call in in_order]) * 1e6
    # Which experts are touched differs from set to set.
    floor_bytes = sum(call.floor_bytes for call in in_order) / len(in_order)
    floor = floor_us(floor_bytes, copy_tb_per_s)
    return KernelFigure(*shape, us=us, floor_bytes=round(floor_bytes), floor_us=floor, ratio=us / floor, error=error)
