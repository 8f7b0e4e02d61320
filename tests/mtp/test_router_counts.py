"""Which tokens move the routers' balance bias: each real token of the trunk, each MTP site with a target, once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from bailing_mtp.contracts import sites
from bailing_mtp.contracts.batch import TokenBatch
from bailing_mtp.model.router import GroupLimitedRouter
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.training.state import TrainState
from bailing_mtp.training.step import accumulate_gradients
from tests.distributed import worlds
from tests.mtp import models, plain

PACK = models.pack((19, 2, 5, 11, 3), (False, False, True, False, True))
DEPTH = 2


@pytest.fixture(scope="module")
def context() -> Iterator[ParallelContext]:
    with worlds.layout(tp=1, ep=1) as found:
        yield found


def _routers(state: TrainState) -> dict[str, GroupLimitedRouter]:
    return {
        f"{group}.{name}": module
        for group, chunk in models.named_chunks(state)
        for name, module in chunk.module.named_modules()
        if isinstance(module, GroupLimitedRouter)
    }


def _counts(state: TrainState) -> dict[str, Tensor]:
    return {name: router.local_tokens_per_expert.clone() for name, router in _routers(state).items()}


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_counts_are_exactly_those_of_the_counted_tokens(
    context: ParallelContext, monkeypatch: pytest.MonkeyPatch, share: float
):
    """Per router, from the routing map of every call: expert by expert, not only the total; with the MTP layer on
    every site and on those that it needs."""
    monkeypatch.setattr(sites, "WORTHWHILE_SHARE", share)
    part = sites.DraftSites.of(PACK, DEPTH)
    state = models.fixture_state(context)
    maps: dict[str, list[Tensor]] = {}
    for name, router in _routers(state).items():
        router.register_forward_hook(lambda module, args, out, n=name: maps.setdefault(n, []).append(out[1]))
    accumulate_gradients(state, [PACK], models.objective(depth=DEPTH, objective="soft", detach=True))
    real = [t for span in plain.documents(PACK) for t in span]
    per_token = state.trunk_module.arch.experts_per_token
    for name, counts in _counts(state).items():
        counted = [real]
        if name.startswith("mtp"):
            counted = [plain.valid_sites(PACK, d + 1) for d in range(DEPTH)]
            if part is not None:
                rows = {site: row for row, site in enumerate(part.sites_Q.tolist())}
                counted = [[rows[site] for site in found] for found in counted]
        assert len(maps[name]) == len(counted)
        expected = sum(routing[rows].sum(0) for routing, rows in zip(maps[name], counted, strict=True))
        assert torch.equal(counts.long(), expected.long()), name
        assert int(counts.sum()) == per_token * sum(len(rows) for rows in counted)


def test_what_stands_in_padding_changes_nothing(context: ParallelContext):
    state = models.fixture_state(context)
    other_ids_T = torch.where(PACK.layout.padding_T, (PACK.input_ids_T + 100) % 512, PACK.input_ids_T)
    found = []
    for batch in (PACK, dataclasses.replace(PACK, input_ids_T=other_ids_T)):
        for router in _routers(state).values():
            router.local_tokens_per_expert.zero_()
        accumulate_gradients(state, [batch], models.objective(depth=DEPTH))
        found.append((_counts(state), models.main_grads(state)))
    (counts, grads), (other_counts, other_grads) = found
    assert all(torch.equal(counts[name], other_counts[name]) for name in counts)
    for name, grad in grads.items():
        scale = float(grad.abs().max())
        torch.testing.assert_close(other_grads[name], grad, atol=1e-5 * scale + 1e-9, rtol=1e-4)


def test_no_mtp_site_leaves_the_mtp_bias_alone(context: ParallelContext):
    state = models.fixture_state(context)
    accumulate_gradients(state, [models.pack((2, 2, 1))], models.objective(depth=DEPTH))
    for name, counts in _counts(state).items():
        assert int(counts.sum()) == (0 if name.startswith("mtp") else 5 * state.trunk_module.arch.experts_per_token)


@pytest.mark.parametrize("detach", [False, True])
def test_full_recompute_counts_once_and_gives_the_same_gradients(context: ParallelContext, detach: bool):
    found = []
    batches: list[TokenBatch] = [PACK, models.pack((30, 4), seed=9)]
    for recompute in ("none", "full"):
        settings = dataclasses.replace(worlds.FP32, recompute=recompute)
        state = models.fixture_state(context, settings)
        accumulate_gradients(state, batches, models.objective(depth=DEPTH, detach=detach))
        found.append((_counts(state), models.main_grads(state)))
    (counts, grads), (again, recomputed) = found
    assert all(torch.equal(again[name], counts[name]) for name in counts)
    for name, grad in grads.items():
        torch.testing.assert_close(recomputed[name], grad, atol=1e-6 * float(grad.abs().max()) + 1e-12, rtol=1e-6)
