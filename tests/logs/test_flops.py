"""Model FLOPs against numbers worked out by hand, and against the rule of thumb 6 N."""

import pytest
import torch

from bailing_mtp.config import PretrainConfig
from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.contracts.batch import PackedLayout, TokenBatch
from bailing_mtp.training.flops import peak_flops_per_s, training_flops
from recipes.compose import compose


def architecture(model: str) -> Architecture:
    plain = compose(PretrainConfig, "pretrain", [f"model={model}"], run_dir="out")
    return Architecture.from_hf(plain["model"]["architecture"], model, strict=True)


# model=tiny: H 128, 2 heads, d = v = 64; KDA in layers 0 to 2, MLA in 3 and 4, dense MLP in 0, experts in 1 to 4.
KDA_WEIGHTS = 128 * (5 * 128 + 2) + 384 * 4 + 128 * 128
KDA_RECURRENCE = 2 * (6 * 64 * 64 + 64 * (3 * 64 + 2 * 64) + 64 * 64 / 3)
KEY_WEIGHTS = 128 * (64 + 32) + 64 * 2 * (32 + 64)
MLA_WEIGHTS = 128 * 64 + 64 * 128 + KEY_WEIGHTS + 128 * 2 + 128 * 128
DENSE_WEIGHTS = 3 * 128 * 256
MOE_WEIGHTS = 16 * 128 + (4 + 1) * 3 * 128 * 64
HEAD_WEIGHTS = 4096 * 128
MTP_WEIGHTS = 2 * 128 * 128 + MLA_WEIGHTS + MOE_WEIGHTS
PAIR = 2 * 2 * (64 + 64)


def test_tiny_without_mtp():
    weights = 3 * KDA_WEIGHTS + 2 * MLA_WEIGHTS + DENSE_WEIGHTS + 4 * MOE_WEIGHTS
    flops = training_flops(architecture("tiny"))
    assert flops.per_token == pytest.approx(6 * weights + 3 * 3 * KDA_RECURRENCE)
    assert flops.per_site == (6 * HEAD_WEIGHTS,) and flops.per_key == 0
    assert flops.per_token + flops.per_site[0] == pytest.approx(10_062_336)
    assert flops.per_pair == 3 * 2 * PAIR == 3072


def test_each_mtp_depth_runs_the_layer_and_the_head_once():
    arch = architecture("tiny")
    trunk, joint = training_flops(arch), training_flops(arch, mtp_depth=2)
    assert (joint.per_token, joint.per_pair, joint.per_site[0]) == (trunk.per_token, trunk.per_pair, trunk.per_site[0])
    # At depth 2 a site also makes a key, and sees the one key of its own chain.
    assert joint.per_key == 6 * (2 * 128 * 128 + KEY_WEIGHTS)
    first, second = joint.per_site[1:]
    assert joint.per_key + first == 6 * (MTP_WEIGHTS + HEAD_WEIGHTS)
    assert second == 6 * (MTP_WEIGHTS + HEAD_WEIGHTS) + 3 * PAIR and joint.per_mtp_pair == 3 * PAIR
    detached = training_flops(arch, mtp_depth=2, mtp_detached=True)
    saved = [a - b for a, b in zip(joint.per_site, detached.per_site, strict=True)]
    assert saved == [0, 2 * HEAD_WEIGHTS, 2 * HEAD_WEIGHTS]


def test_documents_cost_their_own_pairs_and_padding_nothing():
    flops = training_flops(architecture("tiny"))
    layout = PackedLayout.build([5, 3, 8], [False, False, True])
    batch = TokenBatch(torch.zeros(16, dtype=torch.int64), torch.ones(16, dtype=torch.bool), layout)
    once = 8 * flops.per_token + (15 + 6) * flops.per_pair + (4 + 2) * flops.per_site[0]
    assert flops.of([batch, batch]) == pytest.approx(2 * once)


def test_only_sites_with_a_target_ask():
    """Of seven tokens the fourth and fifth are trained: depth 1 asks at sites 1 and 2, depth 2 at 0 and 1."""
    flops = training_flops(architecture("tiny"), mtp_depth=2)
    mask_T = torch.tensor([0, 0, 0, 1, 1, 0, 0] + [0] * 4, dtype=torch.bool)
    batch = TokenBatch(torch.zeros(11, dtype=torch.int64), mask_T, PackedLayout.build([7, 4]))
    pairs = 7 * 8 // 2 + 4 * 5 // 2
    trunk = 11 * flops.per_token + pairs * flops.per_pair + 2 * flops.per_site[0]
    mtp = 2 * flops.per_site[1] + 2 * flops.per_site[2] + 3 * flops.per_key + (2 + 3 + 1 + 2) * flops.per_mtp_pair
    assert flops.of([batch]) == pytest.approx(trunk + mtp)


def test_ling3_tiny_is_near_six_times_its_active_parameters():
    arch = architecture("ling3_tiny")
    idle_experts = 23 * (128 - 8) * 3 * 1536 * 512
    active = 7_893_392_800 - idle_experts - 157184 * 1536
    flops = training_flops(arch)
    ratio = (flops.per_token + flops.per_site[0]) / (6 * active)
    assert 1.0 < ratio < 1.03


def test_peak_is_known_or_absent():
    assert peak_flops_per_s("NVIDIA H200") == peak_flops_per_s("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops_per_s("NVIDIA A100-SXM4-80GB") is None
