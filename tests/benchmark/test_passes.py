"""The passes of a step on a model of random weights, with torch kernels and a clock made up."""

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch

from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.contracts.clock import WeightsClock
from bailing_mtp.kernels.reference import decode
from bailing_mtp.weights.view import publish
from recipes.bench_case import Draw
from recipes.bench_figures import PassFigure
from recipes.bench_passes import measure_passes, step_ms
from recipes.bench_weights import random_view
from tests.benchmark.sizes import smallest
from tests.weights.stand_in import WHOLE, build, tiny_config


def draw_on_cpu(dtype: torch.dtype = torch.float32) -> Draw:
    return Draw(torch.device("cpu"), dtype, 0)


def shapes(node: object) -> object:
    """A tree of weights with every tensor replaced by its shape and dtype."""
    if isinstance(node, torch.Tensor):
        return tuple(node.shape), node.dtype
    if isinstance(node, tuple):
        return tuple(shapes(child) for child in node)
    if dataclasses.is_dataclass(node) and not isinstance(node, Architecture | WeightsClock):
        return {field.name: shapes(getattr(node, field.name)) for field in dataclasses.fields(node)}
    return node


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None, "tie_word_embeddings": True}])
def test_random_weights_have_the_shapes_of_a_published_model(changes: dict[str, object]):
    arch = Architecture.from_hf(tiny_config(**changes), "test")
    trunk, mtp = build(arch, WHOLE)
    trunk.arch = arch
    published = publish(trunk, mtp, WHOLE, WeightsClock())
    assert shapes(random_view(arch, draw_on_cpu(torch.bfloat16))) == shapes(published)


def ticking() -> Callable[[Sequence[Callable[[], object]]], float]:
    """A clock that runs the calls, and gives 1, 2, 3, ... ms."""
    times = iter(range(1, 100))

    def timer(calls: Sequence[Callable[[], object]]) -> float:
        for call in calls:
            call()
        return next(times) / 1e3

    return timer


def measured(arch: Architecture) -> list[PassFigure]:
    draw, shown = draw_on_cpu(), []
    with torch.no_grad():
        figures = measure_passes(random_view(arch, draw), decode, draw, ticking(), (2,), (1, 4), 9, shown.append)
    assert shown == figures
    return figures


def test_every_pass_of_a_step_is_timed():
    expected = [
        ("trunk", 1, 1),
        ("head", 1, 2),
        ("step (no sampling)", 1, 3),
        ("trunk", 4, 3),
        ("head", 4, 4),
        ("head of a draft", 4, 5),
        ("mtp refresh", 4, 6),
        ("mtp step", 4, 7),
        # Three drafts: the refresh gives one, two steps the others; each has its head.
        ("step (no sampling)", 4, 3 + 4 + 3 * 5 + 6 + 2 * 7),
    ]
    figures = measured(smallest())
    assert [(x.name, x.fed_tokens, pytest.approx(x.ms)) for x in figures] == expected
    assert {x.rows for x in figures} == {2}


def test_a_model_without_an_mtp_layer_has_no_drafts():
    figures = measured(dataclasses.replace(smallest(), num_mtp_layers=0))
    assert [x.name for x in figures] == ["trunk", "head", "step (no sampling)"] * 2
    assert step_ms({"trunk": 2.0, "head": 1.0}, 4) == 3.0
