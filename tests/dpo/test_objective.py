"""The DPO objective on a real model: values, MTP sites, gradients, and its reference log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from bailing_mtp.config import MtpConfig, PreferenceConfig
from bailing_mtp.contracts.pairs import PairBatch
from bailing_mtp.losses.dpo import dpo_terms
from bailing_mtp.model.build import BuiltModel
from bailing_mtp.training.preference import DpoObjective, reference_logprobs
from bailing_mtp.training.state import TrainState
from bailing_mtp.training.step import accumulate_gradients, train_step
from tests.distributed import worlds
from tests.dpo.pairs import pair_batch, without_rejected_mtp
from tests.mtp import models

PAIRS = pair_batch((4, 3, 6), (2, 5, 1), padding=5)
DPO = PreferenceConfig(beta=0.3, label_smoothing=0.1)
OFF, DETACHED = MtpConfig(), MtpConfig(loss_scale=0.3, detach=True, depth=2)


@pytest.fixture(scope="module")
def state() -> Iterator[TrainState]:
    with worlds.layout(tp=1, ep=1) as context:
        yield models.fixture_state(context)


def row_sums(state: TrainState, batch: PairBatch) -> Tensor:
    """Plain torch on whole logits: log-probability of every row's response."""
    logits_TV = state.trunk(batch).squeeze(1) @ state.trunk_module.head_weight.T
    log_probs_TV = logits_TV.log_softmax(-1)
    sums, begin = [], 0
    for length in batch.layout.lengths[: 2 * batch.n_pairs]:
        tokens = [t for t in range(begin + 1, begin + length) if batch.loss_mask_T[t]]
        sums.append(sum(log_probs_TV[t - 1, batch.input_ids_T[t]].double() for t in tokens))
        begin += length
    return torch.stack(sums).view(-1, 2)


def test_only_chosen_rows_are_mtp_targets():
    """Rows of 7, 10, 7 and 3 tokens: t+2 targets in the responses of the first and third row alone."""
    assert PAIRS.layout.lengths == (7, 10, 7, 3, 5)
    mtp_sites = PAIRS.shift(1).valid_T.nonzero().flatten().tolist()
    assert mtp_sites == [2, 3, 4, 17, 18, 19, 20, 21]
    lm_sites = PAIRS.shift(0).valid_T.nonzero().flatten().tolist()
    assert lm_sites == [3, 4, 5, 10, 11, 12, 13, 14, 15, 18, 19, 20, 21, 22, 25]
    objective = DpoObjective(DPO, DETACHED)
    assert objective.count(PAIRS) == {"pairs": 2, "sites_depth0": 15, "sites_depth1": 8, "sites_depth2": 7}
    padded = PAIRS.padded_to(16)
    assert padded.layout.n_tokens == 32 and padded.n_pairs == 2
    shared = without_rejected_mtp(PAIRS)
    assert objective.count(shared)["sites_depth1"] > 8


def test_loss_metrics_and_gradients_against_plain_torch(state: TrainState):
    objective = DpoObjective(DPO, OFF, chunk_tokens=16)
    models.clear_gradients(state)
    policy_P2 = row_sums(state, PAIRS)
    terms = dpo_terms(policy_P2, PAIRS.reference_P2, 0.3, 0.1)
    (terms.loss_P.sum() / 4).backward()
    expected = models.main_grads(state)
    models.clear_gradients(state)
    found = objective(state, PAIRS, {"pairs": 4})
    found.total.backward()
    torch.testing.assert_close(found.total.double(), terms.loss_P.sum() / 4, atol=1e-5, rtol=1e-5)
    margin = terms.reward_P2[:, 0] - terms.reward_P2[:, 1]
    torch.testing.assert_close(found.sums["dpo/margin"], margin.sum(), atol=1e-4, rtol=1e-5)
    assert float(found.sums["dpo/accuracy"]) == float((margin > 0).sum())
    for name, grad in models.main_grads(state).items():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(grad, expected[name], atol=1e-4 * scale + 1e-7, rtol=1e-3)


def test_detached_mtp_loss_leaves_the_policy_alone_and_ignores_rejected_rows(state: TrainState):
    plain, with_mtp = DpoObjective(DPO, OFF, 16), DpoObjective(DPO, DETACHED, 16)
    grads, sums = [], []
    for objective, batch in ((plain, PAIRS), (with_mtp, PAIRS), (with_mtp, without_rejected_mtp(PAIRS))):
        gathered = accumulate_gradients(state, [batch], objective)
        grads.append(models.main_grads(state))
        sums.append(gathered.sums)
    for name, grad in grads[0].items():
        if name.startswith("trunk."):
            assert torch.equal(grad, grads[1][name]), name
    assert all(torch.equal(sums[0][name], sums[1][name]) for name in sums[0])
    moved = grads[1]["mtp.eh_proj.weight"]
    assert float(moved.abs().max()) > 1e-6 and not torch.equal(moved, grads[2]["mtp.eh_proj.weight"])


def test_at_the_start_the_policy_is_its_own_reference(state: TrainState):
    built = BuiltModel(state.trunk_module, state.mtp_module)
    rows = [pair_batch((3, 4, 2), padding=3), pair_batch((2, 1, 6), seed=1)]
    packs = [[2, 3], [0, 1]]
    before = models.weights(state)
    found_N = reference_logprobs(built, packs, lambda documents: rows[documents[0] // 2], state.context)
    assert built.trunk.training
    with torch.no_grad():
        expected = torch.cat([row_sums(state, batch).flatten() for batch in rows])
    torch.testing.assert_close(found_N, expected, atol=1e-4, rtol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in models.weights(state).items())
    batches = [PairBatch.of(rows[i], found_N[2 * i : 2 * i + 2].view(1, 2)) for i in range(2)]
    metrics = train_step(state, batches, DpoObjective(PreferenceConfig(beta=0.3), DETACHED, 16)).metrics
    assert metrics["dpo/loss"] == pytest.approx(0.693147, abs=1e-4)
    assert metrics["dpo/chosen_reward"] == pytest.approx(0, abs=1e-4)
    after = train_step(state, batches, DpoObjective(PreferenceConfig(beta=0.3), DETACHED, 16)).metrics
    assert after["dpo/loss"] < 0.69 and after["dpo/margin"] > 0 and after["dpo/accuracy"] == 1.0
