"""The shipped architectures: exact sizes, and every kind of layer where the plan puts it."""

import dataclasses

import pytest
import torch

from bailing_mtp.config import PretrainConfig
from bailing_mtp.contracts.architecture import Architecture, UnsupportedArchitecture
from bailing_mtp.model.build import build_model, build_on_meta, count_parameters
from bailing_mtp.model.settings import ModelSettings
from bailing_mtp.weights.fresh import init_fresh
from bailing_mtp.weights.names import Shard
from recipes.compose import compose

BF16 = ModelSettings(torch.bfloat16, torch.bfloat16)


def preset(name: str, **changes: object) -> Architecture:
    plain = compose(PretrainConfig, "pretrain", [f"model={name}", "run_dir=x", "data.path=x", "train.steps=2"])
    return Architecture.from_hf({**plain["model"]["architecture"], **changes}, "model.architecture", strict=True)


def test_ling3_tiny_has_the_published_number_of_parameters(context):
    built = build_on_meta(preset("ling3_tiny"), BF16, context)
    assert count_parameters(built.trunk) == 7_893_392_800
    assert count_parameters(*built.modules) == 8_209_997_600


def test_ling3_flash_builds_without_memory(context):
    arch = preset("ling3_flash")
    built = build_on_meta(arch, BF16, context)
    assert all(parameter.is_meta for module in built.modules for parameter in module.parameters())
    assert [plan.index for plan in arch.trunk_plan() if plan.mixer == "mla"] == [5, 11, 17, 23, 29, 35, 41]
    assert not hasattr(built.trunk.decoder.layers[5].self_attention, "q_a_proj"), "flash has direct queries"


def test_tiny_has_every_kind_of_layer():
    kinds = {(plan.mixer, plan.mlp) for plan in preset("tiny").trunk_plan()}
    assert kinds == {("kda", "dense"), ("kda", "moe"), ("mla", "moe")}


def test_the_last_incomplete_group_is_softmax():
    arch = preset("tiny", num_hidden_layers=7)
    assert [plan.mixer for plan in arch.trunk_plan()] == ["kda", "kda", "kda", "mla", "mla", "mla", "mla"]


def test_dtypes_follow_the_rules(context):
    built = build_model(preset("tiny"), dataclasses.replace(BF16, router_dtype=torch.float32), context, with_mtp=True)
    fp32 = ("A_log", "dt_bias", "expert_bias", "router.weight")
    for module in built.modules:
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name.endswith("local_tokens_per_expert"):
                continue
            expected = torch.float32 if name.endswith(fp32) else torch.bfloat16
            assert tensor.dtype == expected, name


def test_a_seed_gives_one_model_and_another_seed_another(context):
    arch = preset("tiny")
    models = [build_model(arch, ModelSettings(torch.float32, torch.float32), context, True) for _ in range(3)]
    for built, seed in zip(models, (1, 1, 2), strict=True):
        init_fresh(arch, Shard(), built.trunk, built.mtp, seed)
    first, again, other = ({n: p for m in built.modules for n, p in m.named_parameters()} for built in models)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])
    assert all(torch.isfinite(p).all() for p in first.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers: 2 is not supported; allowed: 0, 1"),
        ({"mtp_use_kda": True}, "mtp_use_kda: True is not supported"),
        ({"no_kda_lora": False}, "no_kda_lora: False is not supported"),
        ({"gated_attention_proj_granularity_type": "element_wise"}, "allowed: head_wise"),
        ({"score_function": "softmax"}, "score_function: 'softmax' is not supported; allowed: sigmoid"),
        ({"rope_scaling": {"factor": 2}}, "rope_scaling"),
        ({"architectures": ["LlamaForCausalLM"]}, "BailingMoeV3ForCausalLM"),
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ({"num_key_value_heads": 1}, "num_key_value_heads: 1 is not supported"),
        ({"hiden_size": 5}, "unknown key hiden_size; did you mean hidden_size?"),
        ({"hidden_size": "128"}, "hidden_size: '128' is not supported; allowed: an integer >= 1"),
        ({"kda_lower_bound": None}, "kda_lower_bound"),
        ({"n_routed_experts": 32}, "spellings of one value and disagree"),
        ({"topk_group": 9}, "topk_group: 9 must be at most n_group = 4"),
    ],
)
def test_unsupported_variants_are_refused_by_name(change: dict, message: str):
    with pytest.raises(UnsupportedArchitecture, match=message.replace("?", r"\?")):
        preset("tiny", **change)


def test_both_spellings_of_rope_theta():
    assert preset("tiny", rope_theta=None, rope_parameters={"rope_theta": 7e5}).rope_theta == 7e5
    with pytest.raises(UnsupportedArchitecture, match="disagree"):
        preset("tiny", rope_parameters={"rope_theta": 7e5})
    with pytest.raises(UnsupportedArchitecture, match="rope_theta .* is missing"):
        preset("tiny", rope_theta=None)


def test_aliases_mean_the_same():
    aliased = preset("tiny", num_experts=None, n_routed_experts=16, n_group=None, moe_router_num_groups=4)
    assert aliased == preset("tiny")
