"""What the MTP layer must not touch: the trunk when detached, anything at all when it is off."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bailing_mtp.contracts.batch import TokenBatch
from bailing_mtp.model.build import build_model
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.training.objective import PretrainObjective
from bailing_mtp.training.state import DdpOptions, build_state
from bailing_mtp.training.step import accumulate_gradients, train_step
from bailing_mtp.weights.fresh import init_fresh
from bailing_mtp.weights.load import load_hf, read_architecture
from bailing_mtp.weights.names import Shard, mtp_map, trunk_map
from tests.distributed import worlds
from tests.mtp import models


@pytest.fixture(scope="module")
def context() -> Iterator[ParallelContext]:
    with worlds.layout(tp=1, ep=1) as found:
        yield found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_detached_loss_moves_only_the_mtp_layer(context: ParallelContext, tied: bool, kind: str):
    """MTP loss alone (no language-model sites): every gradient outside mtp.* is exactly zero."""
    state = models.fresh_state(context, tie_embeddings=tied)
    pack = models.pack((19, 8, 30))
    batch = TokenBatch(
        pack.input_ids_T, torch.zeros_like(pack.loss_mask_T), pack.layout, mtp_mask_T=pack.loss_mask_T
    )
    accumulate_gradients(state, [batch], models.objective(objective=kind, detach=True, depth=2))
    for name, grad in models.main_grads(state).items():
        # An expert that no token chose has no gradient; the routed experts together have one.
        assert bool(grad.any()) == name.startswith("mtp."), name
    accumulate_gradients(state, [batch], models.objective(objective=kind, depth=2))
    grads = models.main_grads(state)
    assert grads["trunk.embedding.weight"].any() and ("trunk.head.weight" in grads) != tied


@pytest.mark.parametrize(("kind", "depth", "chunk_tokens"), [("hard", 1, 32), ("soft", 2, 32), ("soft", 2, None)])
def test_trunk_is_bit_equal_with_and_without(context: ParallelContext, kind: str, depth: int, chunk_tokens: int | None):
    """Five clipped steps; several head chunks per pack; the trunk never feels a detached MTP layer."""
    batches = worlds.microbatches(2)
    off, on = models.fixture_state(context), models.fixture_state(context)
    off.clip_norm = on.clip_norm = 0.05
    for _ in range(5):
        metrics = train_step(off, batches, models.objective(chunk_tokens, loss_scale=None)).metrics
        assert metrics["train/grad_norm"] > off.clip_norm
    objective = models.objective(chunk_tokens, objective=kind, detach=True, depth=depth, loss_scale=5.0)
    start = models.weights(on)
    for _ in range(5):
        train_step(on, batches, objective)
    ours, theirs = models.weights(on), models.weights(off)
    trunk = [name for name in ours if name.startswith("trunk.")]
    assert any("expert_bias" in name for name in trunk)
    assert all(torch.equal(ours[name], theirs[name]) for name in trunk)
    assert not torch.equal(ours["mtp.eh_proj.weight"], start["mtp.eh_proj.weight"])


def test_off_means_not_built(context: ParallelContext):
    """No layer, no parameter in the optimizer, no metric, no tensor named in a checkpoint's map."""
    arch = read_architecture(worlds.FIXTURES / "moe")
    built = build_model(arch, worlds.FP32, context, with_mtp=False)
    report = load_hf(worlds.FIXTURES / "moe", arch, Shard(), built.trunk, None)
    state = build_state(built, context, worlds.OPTIM, 10, DdpOptions(overlap_grad_reduce=False))
    assert built.mtp is None and state.mtp is None and state.mtp_module is None and len(state.chunks) == 1
    with_mtp = models.fixture_state(context)
    sizes = [
        sum(parameter.numel() for part in x.optimizer.chained_optimizers for parameter in part.get_parameters())
        for x in (state, with_mtp)
    ]
    n_trunk = sum(p.numel() for p in built.trunk.parameters())
    n_mtp = sum(p.numel() for p in with_mtp.mtp_module.parameters())
    assert sizes == [n_trunk, n_trunk + n_mtp]
    objective = models.objective(loss_scale=None)
    result = train_step(state, worlds.microbatches(1), objective)
    assert not any("mtp" in name for name in result.metrics) and set(result.counts) == {
        "sites_depth0", "tokens", "padding_tokens",
    }  # fmt: skip
    pieces = {p.hf_name for m in trunk_map(arch, Shard()).values() for p in m.pieces}
    mtp_pieces = {p.hf_name for m in mtp_map(arch, Shard()).values() for p in m.pieces}
    assert not pieces & mtp_pieces and set(report.passed_through) == mtp_pieces


def test_deeper_evaluation_does_not_change_the_loss(context: ParallelContext):
    """A depth that is only looked at adds metrics and no loss."""
    state = models.fresh_state(context)
    batch = models.pack((19, 8, 30))
    one = models.objective(depth=1)
    deeper = PretrainObjective(one.mtp, depths=3, chunk_tokens=one.chunk_tokens)
    totals = [objective(state, batch, objective.count(batch)) for objective in (one, deeper)]
    torch.testing.assert_close(totals[0].total, totals[1].total, atol=0, rtol=1e-6)
    assert "mtp/accept_depth3" in deeper.denominators() and float(totals[1].sums["mtp/loss_depth3"]) > 0


def test_tied_model_has_one_table(context: ParallelContext):
    arch = models.fresh_state(context, tie_embeddings=True).trunk_module.arch
    assert arch.tie_embeddings and "head.weight" not in trunk_map(arch, Shard())
    built = build_model(arch, worlds.FP32, context, with_mtp=True)
    init_fresh(arch, Shard(), built.trunk, built.mtp, seed=1)
    assert built.trunk.head_weight is built.trunk.embedding.weight
