"""The unrolled training forward is the function that a rollout drafts with, site by site."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

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


def _training_hidden(state: TrainState, batch: TokenBatch, depths: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """What the objective's own forward gives: trunk hidden [T, 1, H] and the depths' [T, H]."""
    seen: dict[str, Tensor] = {}
    hooks = [
        state.trunk_module.register_forward_hook(lambda module, args, out: seen.update(trunk=out)),
        state.mtp_module.register_forward_hook(lambda module, args, out: seen.update(mtp=out)),
    ]
    objective = models.objective(depth=depths)
    objective(state, batch, objective.count(batch))
    for hook in hooks:
        hook.remove()
    return seen["trunk"], tuple(x.squeeze(1) for x in seen["mtp"])


def test_every_depth_equals_a_chain_over_a_cache(state: TrainState):
    hidden, ours = _training_hidden(state, PACK, depths=3)
    built = BuiltModel(state.trunk_module, state.mtp_module)
    with torch.no_grad():
        expected = plain.chain_hidden(built, PACK, hidden.squeeze(1), depths=3)
    head_VH = state.trunk_module.head_weight.detach()
    for depth, (ours_TH, sites) in enumerate(zip(ours, expected, strict=True), start=1):
        assert len(sites) == sum(max(0, n - depth) for n in (13, 7, 1, 2))
        rows = list(sites)
        theirs_NV = torch.stack([sites[t] for t in rows]) @ head_VH.T
        torch.testing.assert_close(ours_TH[rows].detach() @ head_VH.T, theirs_NV, atol=1e-4, rtol=0)
        # What a naive unrolling would give is far away, so the tolerance says something.
        if depth > 1:
            assert float((ours[0][rows].detach() @ head_VH.T - theirs_NV).abs().max()) > 0.1


def test_gradients_flow_through_all_depths(state: TrainState):
    """Of a random function of the depth-2 and depth-3 states, for every MTP parameter and the trunk's state."""
    hidden, ours = _training_hidden(state, SHORT, depths=3)
    built = BuiltModel(state.trunk_module, state.mtp_module)
    expected = plain.chain_hidden(built, SHORT, hidden.squeeze(1), depths=3)
    generator = torch.Generator().manual_seed(0)
    upstream = torch.randn(3, SHORT.layout.n_tokens, hidden.shape[-1], generator=generator)
    sources = [hidden, *state.mtp_module.parameters()]
    names = ["trunk hidden", *(name for name, _ in state.mtp_module.named_parameters())]
    found = []
    for pairs in ([dict(enumerate(x)) for x in ours], expected):
        value = sum((upstream[d, t] * pairs[d][t]).sum() for d in (1, 2) for t in expected[d])
        found.append(torch.autograd.grad(value, sources, retain_graph=True))
    for name, a, b in zip(names, *found, strict=True):
        scale = float(b.abs().max())
        assert scale > 0, name
        torch.testing.assert_close(a, b, atol=1e-4 * scale, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
