"""Losses, counts, gradients and acceptance of the MTP objective against plain torch on whole logits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from bailing_mtp.contracts.batch import PackedLayout, TokenBatch
from bailing_mtp.losses.heads import HeadOptions, head_outputs, reach
from bailing_mtp.training.objective import PretrainObjective
from bailing_mtp.training.state import TrainState
from bailing_mtp.training.step import accumulate_gradients, train_step
from tests.distributed import worlds
from tests.mtp import models, plain

# Chunks of 16 tokens: two full ones and a rest; documents cross their borders, one is too short for any site.
PACK = models.pack((19, 2, 4, 11, 3), (False, False, True, False, True))


@pytest.fixture(scope="module")
def state() -> Iterator[TrainState]:
    with worlds.layout(tp=1, ep=1) as context:
        yield models.fixture_state(context)


def _ahead(values_T: Tensor, batch: TokenBatch, n_ahead: int) -> Tensor:
    """Values n_ahead later in the same document, 0 where there is none."""
    out = torch.zeros_like(values_T)
    for span in plain.documents(batch):
        for t in span:
            if t + n_ahead < span.stop:
                out[t] = values_T[t + n_ahead]
    return out


def _plain_logits(state: TrainState, batch: TokenBatch, depths: int, detach: bool) -> tuple[Tensor, list[Tensor]]:
    """Whole logits with their graph; the layer itself is proven in test_chain."""
    trunk = state.trunk_module
    hidden = state.trunk(batch)
    head_VH = trunk.head_weight
    embeddings = [trunk.embed(_ahead(batch.input_ids_T, batch, depth)) for depth in range(1, depths + 1)]
    source, mtp_head_VH = hidden, head_VH
    if detach:
        embeddings, source, mtp_head_VH = [x.detach() for x in embeddings], hidden.detach(), head_VH.detach()
    positions_T = torch.cat([torch.arange(n) for n in batch.layout.lengths])
    ropes = [trunk.rope(positions_T + depth) for depth in range(depths)]
    nothing = [torch.zeros(batch.layout.n_tokens, dtype=torch.bool)] * depths
    outputs = state.mtp(embeddings, source, ropes, batch.layout, nothing)
    return hidden.squeeze(1) @ head_VH.T, [x.squeeze(1) @ mtp_head_VH.T for x in outputs]


@pytest.mark.parametrize(
    ("kind", "detach", "depth", "decay"),
    [("hard", False, 1, 0.7), ("hard", False, 3, 0.5), ("soft", False, 2, 0.7), ("soft", True, 2, 1.0)],
)
def test_total_counts_and_gradients(state: TrainState, kind: str, detach: bool, depth: int, decay: float):
    objective = models.objective(objective=kind, detach=detach, depth=depth, depth_decay=decay)
    counts = objective.count(PACK)
    assert counts == {f"sites_depth{d}": len(plain.valid_sites(PACK, d)) for d in range(depth + 1)}
    models.clear_gradients(state)
    trunk_TV, mtp_TV = _plain_logits(state, PACK, depth, detach)
    lm, sums = plain.site_losses(PACK, trunk_TV, mtp_TV, kind)
    total = lm / counts["sites_depth0"]
    for d, value in enumerate(sums, start=1):
        total = total + 0.3 * decay ** (d - 1) * value / counts[f"sites_depth{d}"]
    total.backward()
    expected = models.main_grads(state)
    models.clear_gradients(state)
    terms = objective(state, PACK, counts)
    terms.total.backward()
    torch.testing.assert_close(terms.total, total, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(terms.sums["train/lm_loss"], lm.detach(), atol=1e-4, rtol=1e-5)
    for d, value in enumerate(sums, start=1):
        torch.testing.assert_close(terms.sums[f"mtp/loss_depth{d}"], value.detach(), atol=1e-4, rtol=1e-5)
    for name, grad in models.main_grads(state).items():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(
            grad, expected[name], atol=1e-4 * scale + 1e-7, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_joint_loss_reaches_trunk_embedding_and_head(state: TrainState):
    """The MTP loss alone (no language-model sites) moves every part of a joint model."""
    batch = dataclasses.replace(
        PACK, loss_mask_T=torch.zeros_like(PACK.loss_mask_T), mtp_mask_T=torch.ones_like(PACK.loss_mask_T)
    )
    for kind in ("hard", "soft"):
        accumulate_gradients(state, [batch], models.objective(objective=kind, depth=2))
        grads = models.main_grads(state)
        for name in ("trunk.embedding.weight", "trunk.head.weight", "trunk.decoder.final_layernorm.weight"):
            assert float(grads[name].abs().max()) > 1e-6, (kind, name)
        assert float(grads["trunk.decoder.layers.0.self_attention.in_proj.weight"].abs().max()) > 1e-6


def test_acceptance_metrics_of_the_objective(state: TrainState):
    objective = models.objective(depth=3)
    with torch.no_grad():
        sums = objective(state, PACK, objective.count(PACK)).sums
        trunk_TV, mtp_TV = _plain_logits(state, PACK, 3, detach=True)
    for depth, (accepted, reached) in enumerate(plain.acceptance(PACK, trunk_TV, mtp_TV, 1.0), start=1):
        assert float(sums[f"mtp/accept_depth{depth}"]) == pytest.approx(accepted, rel=1e-4)
        assert float(sums[f"mtp/reach_depth{depth}"]) == pytest.approx(reached, rel=1e-4)
        sites = plain.valid_sites(PACK, depth)
        agree = sum(int(mtp_TV[depth - 1][t].argmax() == trunk_TV[t + depth].argmax()) for t in sites)
        assert int(sums[f"mtp/top1_depth{depth}"]) == agree
    assert float(sums["mtp/reach_depth1"]) == objective.count(PACK)["sites_depth1"]
    assert float(sums["mtp/reach_depth3"]) < 0.9 * objective.count(PACK)["sites_depth3"]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_acceptance_at_the_sampling_temperature(temperature: float):
    """Any hidden states will do: D = 3 depths, 12 entries, chunks of 7 tokens."""
    generator = torch.Generator().manual_seed(0)
    streams = [torch.randn(39, 8, generator=generator) for _ in range(4)]
    head_VH = torch.randn(12, 8, generator=generator)
    batch = dataclasses.replace(PACK, input_ids_T=PACK.input_ids_T % 12)
    options = HeadOptions(chunk_tokens=7, temperature=temperature)
    depths = head_outputs(streams[0], tuple(streams[1:]), head_VH, batch, None, options).depths
    trunk_TV, *mtp_TV = (x @ head_VH.T for x in streams)
    expected = plain.acceptance(batch, trunk_TV, mtp_TV, temperature)
    for depth, (outputs, reach_T) in enumerate(zip(depths, reach(depths), strict=True), start=1):
        sites = plain.valid_sites(batch, depth)
        accepted = float((reach_T * outputs.accept_T)[sites].sum())
        assert (accepted, float(reach_T[sites].sum())) == pytest.approx(expected[depth - 1], rel=1e-5)
    # The loss stays at temperature 1 whatever the metric's.
    _, sums = plain.site_losses(batch, trunk_TV, mtp_TV, "hard")
    for depth, value in enumerate(sums, start=1):
        ours = depths[depth - 1].loss_T[plain.valid_sites(batch, depth)].sum()
        torch.testing.assert_close(ours, value, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 16, 39, 1000])
def test_chunking_changes_nothing(chunk_tokens: int):
    """Values and gradients, soft and joint, for chunks that end anywhere, the halo of two sites included."""
    generator = torch.Generator().manual_seed(1)
    leaves = [torch.randn(39, 8, generator=generator).requires_grad_() for _ in range(3)]
    leaves.append(torch.randn(12, 8, generator=generator).requires_grad_())
    batch = dataclasses.replace(PACK, input_ids_T=PACK.input_ids_T % 12)
    results = []
    for plain_way in (False, True):
        if plain_way:
            trunk_TV, *mtp_TV = (x @ leaves[3].T for x in leaves[:3])
            lm, sums = plain.site_losses(batch, trunk_TV, mtp_TV, "soft")
        else:
            options = HeadOptions(chunk_tokens=chunk_tokens, objective="soft")
            outputs = head_outputs(leaves[0], tuple(leaves[1:3]), leaves[3], batch, None, options)
            lm = -outputs.log_prob_T[plain.valid_sites(batch, 0)].sum()
            sums = [outputs.depths[d - 1].loss_T[plain.valid_sites(batch, d)].sum() for d in (1, 2)]
        total = lm + 0.5 * sums[0] + 0.2 * sums[1]
        results.append([total, *torch.autograd.grad(total, leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("objective", ["hard", "soft"])
def test_empty_pack_has_a_graph_and_zero_gradients(objective: str):
    streams = [torch.zeros(0, 8).requires_grad_() for _ in range(3)]
    head_VH = torch.ones(12, 8).requires_grad_()
    ids_T, mask_T = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool)
    batch = TokenBatch(ids_T, mask_T, PackedLayout.build(()))
    options = HeadOptions(chunk_tokens=7, objective=objective)
    outputs = head_outputs(streams[0], tuple(streams[1:]), head_VH, batch, None, options)
    total = outputs.log_prob_T.sum() + sum(depth.loss_T.sum() for depth in outputs.depths)
    grads = torch.autograd.grad(total, [*streams, head_VH])
    assert float(total.detach()) == 0 and not any(grad.any() for grad in grads)


def test_four_microbatches_equal_one_pack(state: TrainState):
    """Documents of four packs, in four microbatches and as one: two joint soft depths."""
    packs = [models.pack(lengths, seed=n) for n, lengths in enumerate([(19, 4), (3,), (2, 2), (30, 1, 6)])]
    whole = TokenBatch(
        torch.cat([x.input_ids_T for x in packs]),
        torch.cat([x.loss_mask_T for x in packs]),
        PackedLayout.build([n for x in packs for n in x.layout.lengths]),
    )
    objective = models.objective(objective="soft", depth=2)
    found = []
    for batches in (packs, [whole]):
        gathered = accumulate_gradients(state, batches, objective)
        found.append((gathered.counts, float(gathered.total), models.main_grads(state)))
    assert found[0][0] == found[1][0] and found[0][1] == pytest.approx(found[1][1], rel=1e-5)
    for name, grad in found[0][2].items():
        scale = float(grad.abs().max())
        torch.testing.assert_close(found[1][2][name], grad, atol=1e-5 * scale + 1e-8, rtol=1e-3)


def test_gradient_of_eh_proj_is_the_mean_over_the_six_targets(state: TrainState):
    """Eight tokens, all trained: depth 1 has six sites, and the gradient is divided by six, not by seven."""
    packed = PackedLayout.build((8,))
    batch = TokenBatch(torch.arange(8) + 40, torch.ones(8, dtype=torch.bool), packed)
    accumulate_gradients(state, [batch], models.objective(loss_scale=1.0, detach=True))
    ours = models.main_grads(state)["mtp.eh_proj.weight"]
    models.clear_gradients(state)
    _, (q_TV,) = _plain_logits(state, batch, 1, detach=True)
    log_q_TV = q_TV.log_softmax(-1)
    (-sum(log_q_TV[t, 40 + t + 2] for t in range(6)) / 6).backward()
    expected = models.main_grads(state)["mtp.eh_proj.weight"]
    assert float((ours - expected).norm() / expected.norm()) < 1e-6


def test_no_valid_target_is_zero_loss_and_finite(state: TrainState):
    """Documents of two tokens have no MTP site: loss 0, zero gradients of the layer, no NaN, and no MTP metric, since
    0 would read as a perfect layer. Documents of three have one of depth 1, and none deeper."""
    objective = models.objective(objective="soft", depth=2)
    for lengths, depths in (((2, 2, 2, 1), set()), ((3, 3, 2), {1})):
        result = train_step(state, [models.pack(lengths)] * 2, objective)
        assert {depth for depth in (1, 2) if result.counts[f"sites_depth{depth}"]} == depths
        found = {name for name in result.metrics if "_depth" in name}
        assert found == {f"mtp/{what}_depth{depth}" for what in ("loss", "top1", "accept") for depth in depths}
        assert (result.metrics["mtp/grad_norm"] > 0) == bool(depths)
        assert all(math.isfinite(value) for value in result.metrics.values())
        assert all(torch.isfinite(tensor).all() for tensor in models.weights(state).values())
    batch = models.pack((2, 2, 2, 1))
    nothing = dataclasses.replace(batch, loss_mask_T=torch.zeros_like(batch.loss_mask_T))
    result = train_step(state, [nothing], objective)
    assert result.metrics["train/loss"] == result.metrics["train/grad_norm"] == 0
    assert "train/lm_loss" not in result.metrics


def test_prompt_logits_do_not_touch_the_loss():
    """A row of which 80 % is prompt: whatever the layer says there, loss and gradient come from the response."""
    batch = TokenBatch(torch.arange(20) % 12, torch.arange(20) >= 16, PackedLayout.build((20,)))
    generator = torch.Generator().manual_seed(2)
    trunk_TH, mtp_TH, noise_TH = (torch.randn(20, 8, generator=generator) for _ in range(3))
    head_VH = torch.randn(12, 8, generator=generator)
    sites_T = batch.shift(1).valid_T
    assert sites_T.nonzero().flatten().tolist() == [14, 15, 16, 17]
    losses = []
    for hidden_TH in (mtp_TH, torch.where(sites_T[:, None], mtp_TH, noise_TH)):
        hidden_TH = hidden_TH.requires_grad_()
        outputs = head_outputs(trunk_TH, (hidden_TH,), head_VH, batch, None, HeadOptions(chunk_tokens=6))
        loss = torch.where(sites_T, outputs.depths[0].loss_T, 0.0).sum()
        (grad_TH,) = torch.autograd.grad(loss, hidden_TH)
        assert not grad_TH[~sites_T].any() and grad_TH[sites_T].abs().sum(-1).min() > 0
        losses.append(loss.detach())
    assert torch.equal(*losses)


def test_only_chosen_rows_of_a_preference_pair_are_counted(state: TrainState):
    """Chosen row, rejected row, both prompt 2 + response 4: the policy loss sees both, the MTP layer the first."""
    response_T = torch.tensor([False] * 2 + [True] * 4).repeat(2)
    chosen_T = torch.tensor([True] * 6 + [False] * 6)
    generator = torch.Generator().manual_seed(5)
    ids_T = torch.randint(0, 512, (12,), generator=generator)
    layout = PackedLayout.build((6, 6))
    pair = TokenBatch(ids_T, response_T, layout, mtp_mask_T=response_T & chosen_T)
    assert pair.shift(0).valid_T.nonzero().flatten().tolist() == [1, 2, 3, 4, 7, 8, 9, 10]
    assert pair.shift(1).valid_T.nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert pair.shift(2).valid_T.nonzero().flatten().tolist() == [0, 1, 2]
    assert pair.padded_to(5).shift(1).valid_T.nonzero().flatten().tolist() == [0, 1, 2, 3]
    objective: PretrainObjective = models.objective(depth=2, detach=True)
    counts = objective.count(pair)
    assert counts == {"sites_depth0": 8, "sites_depth1": 4, "sites_depth2": 3}
    models.clear_gradients(state)
    terms = objective(state, pair, counts)
    terms.total.backward()
    grads = models.main_grads(state)
    other = dataclasses.replace(pair, input_ids_T=torch.where(chosen_T, ids_T, (ids_T + 7) % 512))
    models.clear_gradients(state)
    other_terms = objective(state, other, counts)
    other_terms.total.backward()
    assert float(other_terms.sums["train/lm_loss"]) != pytest.approx(float(terms.sums["train/lm_loss"]), rel=1e-3)
    for name, value in terms.sums.items():
        if name.startswith("mtp/"):
            torch.testing.assert_close(other_terms.sums[name], value, atol=1e-5, rtol=1e-5)
    for name, grad in models.main_grads(state).items():
        if name.startswith("mtp."):
            torch.testing.assert_close(grad, grads[name], atol=1e-5, rtol=1e-4)
