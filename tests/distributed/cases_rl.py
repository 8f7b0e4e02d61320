"""Preference and policy objectives shared by several ranks give what one process computes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bailing_mtp.config import MtpConfig, PreferenceConfig, RlConfig
from bailing_mtp.contracts.batch import TokenBatch
from bailing_mtp.contracts.pairs import PairBatch
from bailing_mtp.contracts.samples import Sample, SamplingParams
from bailing_mtp.losses.documents import document_sums
from bailing_mtp.model.build import BuiltModel
from bailing_mtp.model.settings import ModelSettings
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.rl.samples import PolicyRow, pack_rows
from bailing_mtp.training.objective import Objective
from bailing_mtp.training.policy import PolicyObjective
from bailing_mtp.training.policy_scores import with_logprobs
from bailing_mtp.training.preference import DpoObjective, reference_logprobs
from bailing_mtp.training.scoring import score_batch
from bailing_mtp.training.state import DdpOptions, build_state
from bailing_mtp.training.step import accumulate_gradients, train_step
from bailing_mtp.training.update import finish_gradients
from tests.distributed import worlds
from tests.dpo.pairs import pair_batch
from tests.rollout.engine_rig import all_samples, make_engine, random_prompts
from tests.rollout.routes import random_routes

MTP = MtpConfig(loss_scale=0.3, detach=True, objective="soft")
DPO = DpoObjective(PreferenceConfig(beta=0.2), MTP, chunk_tokens=32)
GRPO = PolicyObjective(RlConfig(), MTP, 0.8, chunk_tokens=32)
REPLAY = PolicyObjective(RlConfig(routing_replay=True), MTP, 0.8, chunk_tokens=32)
POLICY = PolicyObjective(RlConfig(loss="gspo", clip_low=0.5, clip_high=0.5), MTP, 0.8, chunk_tokens=32)


def dpo(reference: worlds.Reference, scratch: Path, tp: int, ep: int) -> None:
    """Unequal numbers of pairs a microbatch; the references, too, are shared among the ranks."""
    sizes = [((9, 6, 4), (3, 7, 5)), ((4, 3, 8),), ((5, 2, 2), (6, 5, 9), (2, 4, 1)), ((7, 8, 3), (1, 3, 2))]
    batches = [pair_batch(*pairs, padding=3, seed=seed) for seed, pairs in enumerate(sizes)]
    expected, expected_N = _on_one_process(DPO, batches), _plain_references(batches[:3])
    with worlds.layout(tp, ep) as context:
        # Three packs, so that one of two ranks repeats the last; rows are numbered from the last pack on.
        first_rows, packs = {}, []
        for batch in batches[2::-1]:
            begin = sum(map(len, packs))
            packs.append(list(range(begin, begin + 2 * batch.n_pairs)))
            first_rows[begin] = batch
        built = worlds.fixture_model("moe", context)
        found_N = reference_logprobs(built, packs[::-1], lambda rows: first_rows[rows[0]], context)
        torch.testing.assert_close(found_N, expected_N, atol=1e-4, rtol=1e-5)
        _compare(DPO, expected, batches[context.dp_rank :: context.dp], context)


def policy(reference: worlds.Reference, scratch: Path, tp: int, ep: int) -> None:
    """Five samples; the ranks' microbatches differ in length and in number of samples."""
    rows = [PolicyRow(_sample(index, 3 + index, 9 - index), 1.0 - 0.4 * index) for index in range(5)]
    per_rank = pack_rows(rows, 24, dist.get_world_size() // tp)
    expected = _on_one_process(POLICY, [batch for batches in per_rank for batch in batches])
    with worlds.layout(tp, ep) as context:
        _compare(POLICY, expected, per_rank[context.dp_rank], context)


def detached(reference: worlds.Reference, scratch: Path, tp: int, ep: int) -> None:
    """Five clipped steps on the same samples: the trunk's bits do not depend on a detached MTP loss."""
    rows = [PolicyRow(_sample(index, 3 + index, 9 - index), 1.0 - 0.4 * index) for index in range(5)]
    per_rank = pack_rows(rows, 24, dist.get_world_size() // tp)
    trunks = []
    for mtp in (MtpConfig(), MTP):
        with worlds.layout(tp, ep) as context:
            built = worlds.fixture_model("moe", context)
            state = build_state(built, context, worlds.OPTIM, 10, DdpOptions(overlap_grad_reduce=False))
            objective = PolicyObjective(RlConfig(clip_low=0.02, clip_high=0.02), mtp, 0.8, chunk_tokens=32)
            mine = per_rank[context.dp_rank]
            clipped = [train_step(state, mine, objective).metrics["policy/clipped"] for _ in range(5)]
            assert max(clipped) > 0.01, clipped
            trunks.append({name: p.detach().clone() for name, p in built.trunk.named_parameters()})
    off, on = trunks
    assert all(torch.equal(off[name], on[name]) for name in off)


def grpo(reference: worlds.Reference, scratch: Path, tp: int, ep: int) -> None:
    """Samples that one process rolled out, on one process and on several: the same step, and ratios of 1 on both."""
    sampling = SamplingParams(temperature=0.8, top_p=0.9, max_new_tokens=9, seed=5)
    with worlds.layout(1, 1) as alone:
        engine = make_engine(worlds.fixture_model("moe", alone), alone, k=2)
        groups = engine.generate(random_prompts(3, 512, sampling, seed=3, samples=2))
    rows = [PolicyRow(sample, 1.0 - 1.5 * sample.sample_index) for sample in all_samples(groups)]
    per_rank = pack_rows(rows, 40, dist.get_world_size() // tp)
    expected = _on_one_process(GRPO, [batch for batches in per_rank for batch in batches])
    assert abs(expected.means["policy/ratio"] - 1) < 1e-4 and expected.means["rollout/logprob_gap"] < 1e-4
    with worlds.layout(tp, ep) as context:
        mine = per_rank[context.dp_rank]
        _compare(GRPO, expected, mine, context)
        trunk = worlds.fixture_model("moe", context).trunk
        for batch in with_logprobs(mine, "old_logprob_T", trunk, context, 0.8):
            torch.testing.assert_close(batch.old_logprob_T, batch.rollout_logprob_T, atol=1e-4, rtol=0)


def replay(
    reference: worlds.Reference, scratch: Path, tp: int, ep: int, settings: ModelSettings = worlds.FP32
) -> None:
    """Split rollouts record what one process records; split steps replay choices that no router would make."""
    sampling, options = SamplingParams(temperature=0.8, max_new_tokens=9, seed=5), {"k": 2, "records_routes": True}
    prompts = random_prompts(3, 512, sampling, seed=3, samples=2, longest=22)
    with worlds.layout(1, 1) as alone:
        groups = make_engine(worlds.fixture_model("moe", alone), alone, **options).generate(prompts)
    with worlds.layout(tp, ep) as context:
        split = make_engine(worlds.fixture_model("moe", context), context, **options).generate(prompts)
    for ours, theirs in zip(all_samples(split), all_samples(groups), strict=True):
        assert ours.response_ids == theirs.response_ids
        np.testing.assert_array_equal(np.sort(ours.routes), np.sort(theirs.routes))
    strange = [replace(s, routes=random_routes(s.routes.shape, 16).numpy()) for s in all_samples(groups)]
    rows = [PolicyRow(sample, 1.0 - 1.5 * sample.sample_index) for sample in strange]
    per_rank = pack_rows(rows, 60, dist.get_world_size() // tp)
    expected = _on_one_process(REPLAY, [batch for batches in per_rank for batch in batches])
    assert 0.1 < expected.means["rollout/route_agreement"] < 0.6
    with worlds.layout(tp, ep) as context:
        _compare(REPLAY, expected, per_rank[context.dp_rank], context, settings)


def _plain_references(batches: list[PairBatch]) -> Tensor:
    """Rows of the batches, those of the last batch first."""
    with worlds.layout(1, 1) as alone:
        trunk = BuiltModel(worlds.fixture_model("moe", alone).trunk, None)
        trunk.trunk.eval()
        rows = []
        for batch in batches[::-1]:
            logprobs_T = score_batch(trunk, batch, alone).logprobs_T
            rows.append(document_sums(logprobs_T, batch.shift(0).valid_T, batch.layout)[: 2 * batch.n_pairs])
    return torch.cat(rows)


def _sample(index: int, n_prompt: int, n_response: int) -> Sample:
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(0, 512, (n_prompt + n_response,), generator=generator).tolist()
    logprobs = tuple((-6.3 + 0.2 * torch.randn(n_response, generator=generator)).tolist())
    return Sample(
        prompt_index=index,
        sample_index=0,
        prompt_ids=tuple(ids[:n_prompt]),
        response_ids=tuple(ids[n_prompt:]),
        logprobs=logprobs,
        processed_logprobs=logprobs,
        kept_logmass=(0.0,) * n_response,
        finish_reason="stop",
    )


class Expected(NamedTuple):
    """Whole gradients by HF name, and the metrics."""

    grads: dict[str, Tensor]
    means: dict[str, float]


def _compare(
    objective: Objective,
    expected: Expected,
    mine: list[TokenBatch],
    context: ParallelContext,
    settings: ModelSettings = worlds.FP32,
) -> None:
    """Gradients and metrics of the ranks' shares against those of all microbatches on one process."""
    built = worlds.fixture_model("moe", context, settings)
    state = build_state(built, context, worlds.OPTIM, 10, DdpOptions(overlap_grad_reduce=False))
    accumulate_gradients(state, mine, objective)
    finish_gradients(state, reduce_whole=True)
    worst = worlds.largest_difference(built, context, expected.grads, "grad")
    assert worst[0] <= 1e-4, f"gradient of {worst[1]} differs by {worst[0]}"
    # A new model: finishing the gradients has moved the routers' bias.
    state = build_state(worlds.fixture_model("moe", context, settings), context, worlds.OPTIM, 10)
    metrics = train_step(state, mine, objective).metrics
    for name, value in expected.means.items():
        assert abs(metrics[name] - value) <= 1e-4 * max(1.0, abs(value)), (name, metrics[name], value)


def _on_one_process(objective: Objective, batches: list[TokenBatch]) -> Expected:
    """Every rank for itself, on modules without DDP: nothing is reduced."""
    with worlds.layout(1, 1) as alone:
        built = worlds.fixture_model("moe", alone)
        state = SimpleNamespace(trunk=built.trunk, trunk_module=built.trunk, mtp=built.mtp, context=alone)
        counts: Counter[str] = Counter()
        sums: Counter[str] = Counter()
        for batch in batches:
            counts.update(objective.count(batch))
        for batch in batches:
            terms = objective(state, batch, counts)
            terms.total.backward()
            sums.update({name: float(value) for name, value in terms.sums.items()})
    for module in built.modules:
        for parameter in module.parameters():
            parameter.main_grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    divisors = {**sums, **counts}
    means = {name: sums[name] / divisors[per] for name, per in objective.denominators().items()}
    return Expected(worlds.whole_tensors(built, "grad"), means)
