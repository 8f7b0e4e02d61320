"""Pieces of the model against values computed by hand or in plain torch."""

import math

import pytest
import torch

from bailing_mtp.contracts.batch import PackedLayout, TokenBatch
from bailing_mtp.errors import UserError
from bailing_mtp.model.build import build_model
from bailing_mtp.model.layers import apply_rope, rope_table
from bailing_mtp.model.mlp import swiglu
from bailing_mtp.model.router import route_weights, select_experts
from bailing_mtp.model.settings import ModelSettings, check_fp8_device
from bailing_mtp.training.scoring import score_batch
from bailing_mtp.weights.fresh import init_fresh
from bailing_mtp.weights.names import Shard
from tests.distributed.golden import check_golden
from tests.model.test_presets import preset

FP32 = ModelSettings(torch.float32, torch.float32)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_golden_fixture_on_one_process(kind: str, context):
    check_golden(kind, context)


def test_rope_turns_adjacent_pairs():
    table = rope_table(torch.tensor([3]), dim=4, theta=100.0)
    turned = apply_rope(torch.tensor([[[1.0, 0.0, 0.0, 2.0]]]), table)
    fast, slow = 3.0, 3.0 / 10.0  # position * theta^(-2i/4) for the pairs i = 0, 1
    expected = [math.cos(fast), math.sin(fast), -2 * math.sin(slow), 2 * math.cos(slow)]
    torch.testing.assert_close(turned.flatten(), torch.tensor(expected))


def test_swiglu_limit_clamps_after_silu():
    gate, up = torch.tensor([8.0, -1.0]), torch.tensor([-9.0, 0.5])
    limited = swiglu(torch.cat((gate, up)), limit=2.0)
    silu = -1.0 / (1.0 + math.e)
    torch.testing.assert_close(limited, torch.tensor([2.0 * -2.0, silu * 0.5]))
    torch.testing.assert_close(swiglu(torch.cat((gate, up)), None), torch.nn.functional.silu(gate) * up)


def test_router_scores_a_group_by_its_best_two_whatever_k_is():
    # Groups {0..3} and {4..7}. By the best two the second wins (1.2 > 1.1); by the best one or three the first would.
    selection = torch.tensor([[0.8, 0.3, 0.3, 0.3, 0.6, 0.6, 0.0, 0.0]])
    for k, expected in ((1, {4, 5}), (2, {4, 5}), (3, {4, 5, 6, 7})):
        chosen = set(select_experts(selection, num_groups=2, groups_per_token=1, experts_per_token=k)[0].tolist())
        assert chosen <= expected and len(chosen) == k


def test_route_weights_use_scores_without_bias():
    scores = torch.tensor([[0.2, 0.6, 0.1]])
    weights = route_weights(scores, torch.tensor([[1, 0]]), scaling=2.5)
    torch.testing.assert_close(weights, torch.tensor([[2.5 * 0.6 / 0.8, 2.5 * 0.2 / 0.8]]))


def test_documents_of_a_pack_do_not_see_each_other(context):
    arch = preset("tiny")
    built = build_model(arch, FP32, context, with_mtp=True)
    init_fresh(arch, Shard(), built.trunk, built.mtp, seed=3)
    for module in built.modules:
        module.eval()
    ids = torch.randint(0, arch.vocab_size, (64,), generator=torch.Generator().manual_seed(0))
    whole = score_batch(built, _pack(ids, (19, 1, 44)), context, with_logits=True)
    begin = 0
    for length in (19, 1, 44):
        alone = score_batch(built, _pack(ids[begin : begin + length], (length,)), context, with_logits=True)
        torch.testing.assert_close(whole.logits_TV[begin : begin + length], alone.logits_TV, atol=1e-4, rtol=1e-4)
        # The last site's input is a placeholder in both.
        rows = slice(begin, begin + length - 1)
        torch.testing.assert_close(whole.mtp_logits_TV[rows], alone.mtp_logits_TV[:-1], atol=1e-4, rtol=1e-4)
        begin += length


def test_a_later_token_changes_nothing_before_it(context):
    arch = preset("tiny")
    built = build_model(arch, FP32, context, with_mtp=True)
    init_fresh(arch, Shard(), built.trunk, built.mtp, seed=3)
    ids = torch.arange(40)
    changed = ids.clone()
    changed[30] = 777
    before, after = (score_batch(built, _pack(x, (40,)), context, with_logits=True) for x in (ids, changed))
    torch.testing.assert_close(before.logits_TV[:30], after.logits_TV[:30], atol=1e-5, rtol=0)
    assert not torch.allclose(before.logits_TV[30:], after.logits_TV[30:])
    # Site 29 of the MTP layer reads token 30.
    torch.testing.assert_close(before.mtp_logits_TV[:29], after.mtp_logits_TV[:29], atol=1e-5, rtol=0)
    assert not torch.allclose(before.mtp_logits_TV[29], after.mtp_logits_TV[29])


@pytest.mark.parametrize(
    "change",
    [{"q_lora_rank": None}, {"tie_word_embeddings": True}, {"kda_safe_gate": False}, {"num_experts": None}],
    ids=lambda change: next(iter(change)),
)
def test_variants_train_every_parameter(change: dict, context):
    arch = preset("tiny", **change)
    built = build_model(arch, FP32, context, with_mtp=True)
    init_fresh(arch, Shard(), built.trunk, built.mtp, seed=3)
    batch = _pack(torch.randint(0, arch.vocab_size, (200,), generator=torch.Generator().manual_seed(0)), (120, 80))
    hidden = built.trunk(batch)
    rope = built.trunk.rope(batch.layout.position_ids_T)
    embedded = built.trunk.embed(batch.token_ahead(1))
    (mtp,) = built.mtp([embedded], hidden, [rope], batch.layout, [batch.layout.padding_T])
    (torch.sin(hidden @ built.trunk.head_weight.T).sum() + torch.sin(mtp @ built.trunk.head_weight.T).sum()).backward()
    for module in built.modules:
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    assert hasattr(built.trunk, "head") != arch.tie_embeddings


def _pack(ids: torch.Tensor, lengths: tuple[int, ...]) -> TokenBatch:
    return TokenBatch(ids, torch.ones_like(ids, dtype=torch.bool), PackedLayout.build(lengths))


@pytest.mark.parametrize(("fp8", "capability"), [("tensorwise", "8.9"), ("blockwise", "9.0"), ("mxfp8", "10.0")])
def test_fp8_is_refused_on_a_gpu_without_it(fp8: str, capability: str, monkeypatch: pytest.MonkeyPatch):
    below = {"8.9": (8, 6), "9.0": (8, 9), "10.0": (9, 0)}[capability]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: below)
    with pytest.raises(UserError, match=f"model.fp8: '{fp8}' needs compute capability {capability} and this GPU has"):
        check_fp8_device(fp8, torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    check_fp8_device(fp8, torch.device("cuda"))
    check_fp8_device(None, torch.device("cuda"))
