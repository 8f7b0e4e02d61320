"""The unrolled training forward is the function that a rollout drafts with, site by site."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from bailing_mtp.contracts import sites
from bailing_mtp.contracts.batch import TokenBatch
from bailing_mtp.model.build import BuiltModel
from bailing_mtp.training.state import TrainState
from tests.distributed import worlds
from tests.mtp import models, plain

# Odd lengths, padding in the middle and at the end, documents too short for a chain.
PACK = models.pack((13, 3, 7, 1, 2, 5), (False, True, False, False, False, True))
SHORT = models.pack((6, 1, 5), (False, True, False))


@pytest.fixture(scope="module")
def state() -> Iterator[TrainState]:
    with worlds.layout(tp=1, ep=1) as context:
        yield models.fixture_state(context)


def _training_hidden(
    state: TrainState, batch: TokenBatch, depths: int, monkeypatch: pytest.MonkeyPatch, share: float
) -> tuple[Tensor, list[dict[int, Tensor]]]:
    """What the objective's own forward gives: trunk hidden [T, 1, H], and per depth site -> [H] of the layer.

    share: largest share of asking sites with which the layer works on a part of the pack.
    """
    monkeypatch.setattr(sites, "WORTHWHILE_SHARE", share)
    seen: dict[str, Any] = {}
    hooks = [
        state.trunk_module.register_forward_hook(lambda module, args, out: seen.update(trunk=out)),
        state.mtp_module.register_forward_hook(lambda module, args, out: seen.update(mtp=out, part=args[5])),
    ]
    objective = models.objective(depth=depths)
    objective(state, batch, objective.count(batch))
    for hook in hooks:
        hook.remove()
    assert (seen["part"] is None) == (share == 0)
    found = range(batch.layout.n_tokens) if seen["part"] is None else seen["part"].sites_Q.tolist()
    return seen["trunk"], [dict(zip(found, x.squeeze(1), strict=True)) for x in seen["mtp"]]


def _common(ours: dict[int, Tensor], theirs: dict[int, Tensor], share: float) -> list[int]:
    """Sites that both have; the whole pack has all of them."""
    found = [t for t in theirs if t in ours]
    assert len(found) == len(theirs) if share == 0 else len(found) > 0.5 * len(theirs)
    return found


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_every_depth_equals_a_chain_over_a_cache(state: TrainState, monkeypatch: pytest.MonkeyPatch, share: float):
    hidden, ours = _training_hidden(state, PACK, 3, monkeypatch, share)
    built = BuiltModel(state.trunk_module, state.mtp_module)
    with torch.no_grad():
        expected = plain.chain_hidden(built, PACK, hidden.squeeze(1), depths=3)
    head_VH = state.trunk_module.head_weight.detach()
    for depth, (ours_at, theirs_at) in enumerate(zip(ours, expected, strict=True), start=1):
        assert len(theirs_at) == sum(max(0, n - depth) for n in (13, 7, 1, 2))
        rows = _common(ours_at, theirs_at, share)
        theirs_NV = torch.stack([theirs_at[t] for t in rows]) @ head_VH.T
        ours_NV = torch.stack([ours_at[t] for t in rows]).detach() @ head_VH.T
        torch.testing.assert_close(ours_NV, theirs_NV, atol=1e-4, rtol=0)
        # What a naive unrolling would give is far away, so the tolerance says something.
        if depth > 1:
            first_NV = torch.stack([ours[0][t] for t in rows]).detach() @ head_VH.T
            assert float((first_NV - theirs_NV).abs().max()) > 0.1


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_gradients_flow_through_all_depths(state: TrainState, monkeypatch: pytest.MonkeyPatch, share: float):
    """Of a random function of the depth-2 and depth-3 states, for every MTP parameter and the trunk's state."""
    hidden, ours = _training_hidden(state, SHORT, 3, monkeypatch, share)
    built = BuiltModel(state.trunk_module, state.mtp_module)
    expected = plain.chain_hidden(built, SHORT, hidden.squeeze(1), depths=3)
    generator = torch.Generator().manual_seed(0)
    upstream = torch.randn(3, SHORT.layout.n_tokens, hidden.shape[-1], generator=generator)
    sources = [hidden, *state.mtp_module.parameters()]
    names = ["trunk hidden", *(name for name, _ in state.mtp_module.named_parameters())]
    rows = [_common(a, b, share) for a, b in zip(ours, expected, strict=True)]
    found = []
    for pairs in (ours, expected):
        value = sum((upstream[d, t] * pairs[d][t]).sum() for d in (1, 2) for t in rows[d])
        found.append(torch.autograd.grad(value, sources, retain_graph=True))
    for name, a, b in zip(names, *found, strict=True):
        scale = float(b.abs().max())
        assert scale > 0, name
        torch.testing.assert_close(a, b, atol=1e-4 * scale, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
