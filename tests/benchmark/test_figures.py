"""From checks and times to the table and the JSON file, with kernels and a clock made up."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from recipes.bench_case import Call, Case
from recipes.bench_figures import KernelFailure, KernelFigure, PassFigure, kernel_line, pass_line, write_figures
from recipes.bench_kernels import measure_kernels
from recipes.bench_timing import in_turn, sets_of_inputs


def made_up(kernel: str, error: float, floor_bytes: Sequence[int], runs: list[str]) -> Case:
    """A case whose sets of inputs have the given floors in turn."""
    made = iter(floor_bytes)
    return Case(
        kernel, 4, 2, lambda draw: Call(lambda: runs.append(kernel), lambda: error, next(made), tolerance=0.01)
    )


def two_microseconds(calls: Sequence[Callable[[], object]]) -> float:
    for call in calls:
        call()
    return 2e-6


def test_a_kernel_that_differs_from_its_twin_gets_no_time():
    runs: list[str] = []
    cases = [
        made_up("right", 0.01, [100_000_000, 300_000_000], runs),
        made_up("wrong", 0.011, [8], runs),
        made_up("not a number", math.nan, [8], runs),
    ]
    shown: list[object] = []
    results = measure_kernels(cases, None, two_microseconds, 4.0, shown.append)
    # Two sets of inputs, used in turn by 12 calls: 200 MB a call on average, at 4 MB/us.
    figure = KernelFigure("right", 4, 2, pytest.approx(2.0), 200_000_000, 50.0, pytest.approx(0.04), 0.01)
    assert results[:2] == [figure, KernelFailure("wrong", 4, 2, 0.011, 0.01)]
    assert isinstance(results[2], KernelFailure) and math.isnan(results[2].error)
    assert shown == results and runs == ["right"] * 12


def test_inputs_take_turns_until_no_cache_holds_them():
    assert [sets_of_inputs(size) for size in (10**9, 10**8, 10**8 - 1, 10**7, 1)] == [2, 2, 3, 20, 24]
    first, second = object(), object()
    assert in_turn([first, second]) == [first, second] * 6
    assert len(in_turn([object()] * 20)) == 20


def test_lines_stand_under_their_headings():
    figure = KernelFigure("kda_verify", 64, 3, 123.456, 200, 50.0, 2.469, 1e-3)
    assert kernel_line(figure).split() == ["kda_verify", "64", "3", "123.46", "50.00", "2.47", "1.0e-03"]
    failure = kernel_line(KernelFailure("route", 1, 1, 0.5, 1e-4))
    assert failure.endswith("differs from its torch twin: relative error 5.0e-01, allowed 1.0e-04")
    assert pass_line(PassFigure("mtp step", 16, 1, 0.25)).split() == ["mtp", "step", "16", "1", "0.250"]


def test_json_holds_every_figure_and_what_failed(tmp_path: Path):
    figure = KernelFigure("experts", 1, 1, 20.0, 43, 10.0, 2.0, 0.0)
    failure = KernelFailure("route", 1, 1, math.inf, 1e-4)
    target = tmp_path / "benchmark.json"
    write_figures(target, {"device": "none"}, [figure, failure], [PassFigure("trunk", 1, 3, 1.5)])
    assert json.loads(target.read_text()) == {
        "device": "none",
        "kernels": [
            {
                "kernel": "experts",
                "rows": 1,
                "fed_tokens": 1,
                "us": 20.0,
                "floor_bytes": 43,
                "floor_us": 10.0,
                "ratio": 2.0,
                "error": 0.0,
            }
        ],
        "failed": [{"kernel": "route", "rows": 1, "fed_tokens": 1, "error": None, "allowed": 1e-4}],
        "passes": [{"name": "trunk", "rows": 1, "fed_tokens": 3, "ms": 1.5}],
    }
    assert [path.name for path in tmp_path.iterdir()] == ["benchmark.json"]
