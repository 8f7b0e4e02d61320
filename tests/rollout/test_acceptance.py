"""Acceptance predicted by forward passes, against rollouts and by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from bailing_mtp.contracts.batch import PackedLayout, TokenBatch
from bailing_mtp.contracts.samples import Prompt, SamplingParams
from bailing_mtp.losses.heads import DepthOutputs, HeadOutputs
from bailing_mtp.model.build import BuiltModel
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.training.acceptance import Ratio, document_estimates, draft_chain, merged
from tests.rollout.engine_rig import all_samples, make_engine


def heads_of(accept: list[list[float]], ratio: list[list[float]]) -> HeadOutputs:
    n = len(accept[0])
    zeros = torch.zeros(n)
    depths = tuple(
        DepthOutputs(zeros + 2.0, torch.tensor(a), zeros + 1.0, torch.tensor(r))
        for a, r in zip(accept, ratio, strict=True)
    )
    return HeadOutputs(zeros - 3.0, zeros, depths, zeros)


def test_steps_start_where_the_drafts_before_ended():
    """Six sites from site 1, k = 1: starts are 1, then what each step leaves over."""
    accept, ratio = [0.9, 0.5, 0.25, 0.75, 0.1, 0.2, 0.3], [0.9, 0.8, 0.5, 0.25, 0.1, 0.2, 0.3]
    found = document_estimates(heads_of([accept], [ratio]), 0, 7, first_site=1)
    starts = [1.0, 0.2, 0.8 + 0.2 * 0.5, 0.2 * 0.5 + (0.8 + 0.2 * 0.5) * 0.75]
    expected = sum(v * a for v, a in zip(starts, accept[1:5], strict=True)) / sum(starts)
    assert found["alpha_1_k1"].value == pytest.approx(expected)
    assert found["accept_length_k1"].value == pytest.approx(1 + expected)
    assert found["alpha_1"].value == pytest.approx(sum(accept[1:5]) / 4) and found["alpha_1"].sites == 4
    assert found["nll_1"].value == 3.0 and found["nll_1"].sites == 5 and found["nll_2"].value == 2.0


def test_deeper_drafts_count_by_the_chance_to_reach_them():
    accept = [[0.5] * 8, [0.25] * 8, [1.0] * 8]
    found = document_estimates(heads_of(accept, accept), 0, 8, first_site=0)
    for k, length in ((1, 1.5), (2, 1.5 + 0.125), (3, 1.5 + 0.25)):
        assert found[f"accept_length_k{k}"].value == pytest.approx(length)
    assert found["alpha_2_k2"].value == pytest.approx(0.25) and found["alpha_3_k3"].value == pytest.approx(1.0)


def test_documents_are_the_clusters_of_the_error():
    ratio = merged([{"x": Ratio([1.0], [2.0], 4)}, {"x": Ratio([3.0], [2.0], 5)}])["x"]
    assert ratio.value == 1.0 and ratio.sites == 9
    assert ratio.standard_error == pytest.approx(math.sqrt(2 * (1 + 1)) / 4)
    assert math.isnan(Ratio([1.0], [2.0], 1).standard_error) and math.isnan(Ratio().value)
    short = document_estimates(heads_of([[0.5] * 2], [[0.5] * 2]), 0, 2, first_site=1)
    assert math.isnan(short["accept_length_k1"].value)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_predictions_meet_measurements(small: BuiltModel, alone: ParallelContext, temperature: float):
    """Depths 1 and 2 of a rollout with two drafts, and its accept length, within four standard errors."""
    sampling = SamplingParams(temperature=temperature, max_new_tokens=50, seed=2)
    prompt = Prompt(prompt_ids=(3, 1, 4), index=0, sampling=sampling, samples_per_prompt=60)
    prompts = [replace(prompt, index=i, prompt_ids=(i, 7, 2)) for i in range(4)]
    engine = make_engine(small, alone, 2, max_running=240, prefill_tokens=64)
    samples = all_samples(engine.generate(prompts))
    measured = engine.stats.summary()
    ids = torch.tensor([[*s.prompt_ids, *s.response_ids] for s in samples])
    parts = []
    for rows in ids.split(40):
        batch = TokenBatch(
            rows.flatten(), torch.ones(rows.numel(), dtype=torch.bool), PackedLayout.build([rows.shape[1]] * len(rows))
        )
        heads = draft_chain(small, batch, alone, temperature, depths=2)
        width = rows.shape[1]
        parts += [document_estimates(heads, i * width, (i + 1) * width, i * width + 2) for i in range(len(rows))]
    found = merged(parts)
    for name, value in (
        ("accept_length_k2", measured["accept_length"]),
        ("alpha_1_k2", measured["accept_depth"][0]),
        ("alpha_2_k2", measured["accept_depth"][1]),
    ):
        noise = found[name].standard_error + 1 / math.sqrt(measured["row_steps"])
        assert abs(found[name].value - value) < 3 * noise, (name, found[name].value, value, noise)
    assert 0.2 < found["alpha_1_k2"].value < 0.9
