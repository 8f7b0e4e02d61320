"""Combinations that need the model's sizes, the world size or the machine."""

import json

import pytest

from bailing_mtp.config import (
    ConfigError,
    LayoutSizes,
    PretrainConfig,
    ScoreConfig,
    build_config,
    check_backends,
    check_batch,
    check_layout,
    check_mtp,
    check_optimizer,
)
from bailing_mtp.config.checks import check_eval_depth
from bailing_mtp.contracts.architecture import Architecture
from recipes import session
from tests.distributed.worlds import FIXTURES

SIZES = LayoutSizes(
    num_attention_heads=16,
    vocab_size=157184,
    intermediate_size=4608,
    moe_intermediate_size=512,
    shared_intermediate_size=512,
    num_experts=128,
)


@pytest.mark.parametrize(
    ("tp", "ep", "world_size", "dp"), [(1, 1, 1, 1), (2, 2, 2, 1), (2, 4, 4, 2), (1, 8, 8, 8), (16, 1, 16, 1)]
)
def test_layout_that_fits_gives_dp(tp: int, ep: int, world_size: int, dp: int):
    assert check_layout(SIZES, tp=tp, ep=ep, world_size=world_size) == dp


@pytest.mark.parametrize(
    ("tp", "ep", "world_size", "line"),
    [
        (3, 1, 3, "parallel.tp: 3 does not divide num_attention_heads=16, vocab_size=157184, moe_inter"),
        (2, 1, 3, "parallel.tp: 2 does not divide world size=3; allowed here: 1"),
        (4, 1, 6, "parallel.tp: 4 does not divide world size=6; allowed here: 1, 2"),
        (1, 3, 3, "parallel.ep: 3 does not divide num_experts=128; allowed here: 1"),
        (2, 4, 2, "parallel.ep: 4 does not divide world size=2; allowed here: 1, 2"),
    ],
)
def test_layout_that_does_not_fit_is_named(tp: int, ep: int, world_size: int, line: str):
    with pytest.raises(ConfigError) as caught:
        check_layout(SIZES, tp=tp, ep=ep, world_size=world_size)
    assert len(caught.value.problems) == 1 and caught.value.problems[0].startswith(line)


@pytest.mark.parametrize("name", ["intermediate_size", "moe_intermediate_size", "vocab_size"])
def test_each_split_width_is_looked_at(name: str):
    sizes = LayoutSizes(**{"num_attention_heads": 4, "vocab_size": 64, name: 6})
    with pytest.raises(ConfigError, match=f"parallel.tp: 4 does not divide {name}=6; allowed here: 1, 2$"):
        check_layout(sizes, tp=4, ep=1, world_size=4)


def test_shared_expert_width_is_looked_at():
    sizes = LayoutSizes(num_attention_heads=4, vocab_size=64, shared_intermediate_size=6)
    with pytest.raises(ConfigError, match="shared expert width=6"):
        check_layout(sizes, tp=4, ep=1, world_size=4)


def test_dense_model_allows_only_ep_1():
    dense = LayoutSizes(num_attention_heads=16, vocab_size=64, intermediate_size=64)
    with pytest.raises(ConfigError, match="parallel.ep: 2 does not divide num_experts=1; allowed here: 1"):
        check_layout(dense, tp=2, ep=2, world_size=2)


def test_batch():
    assert check_batch(tokens_per_step=4096, microbatch_tokens=512, dp=2) == 4
    with pytest.raises(ConfigError, match="5000 is not a multiple.*=512 times dp=2; use 4096 or 5120"):
        check_batch(tokens_per_step=5000, microbatch_tokens=512, dp=2)
    with pytest.raises(ConfigError, match="use 1024$"):
        check_batch(tokens_per_step=512, microbatch_tokens=512, dp=2)


def test_mtp_asked_of_a_checkpoint_without_the_layer():
    with pytest.raises(ConfigError) as caught:
        check_mtp(mtp_layers=0, checkpoint="ckpt/tiny", loss_scale=0.1, speculative_tokens=2)
    loss, speculation = caught.value.problems
    assert loss.startswith("mtp.loss_scale: 0.1 needs an MTP layer and ckpt/tiny has none")
    assert speculation.startswith("rollout.speculative_tokens: 2 needs an MTP layer and ckpt/tiny has none")
    for line in (loss, speculation):
        assert "-base checkpoint" in line and "doctor checkpoint.load=ckpt/tiny graft_from=" in line


def test_mtp_where_it_may_be_asked():
    check_mtp(mtp_layers=0, checkpoint="ckpt")
    check_mtp(mtp_layers=1, checkpoint="ckpt", loss_scale=0.1, speculative_tokens=2)
    check_mtp(mtp_layers=0, checkpoint="ckpt", loss_scale=0.1, speculative_tokens=2, allow_fresh=True)
    with pytest.raises(ConfigError, match="rollout.speculative_tokens: 2"):
        check_mtp(mtp_layers=0, checkpoint="ckpt", speculative_tokens=2, allow_fresh=True)
    with pytest.raises(ConfigError, match="model.architecture has none; set its num_nextn_pre"):
        check_mtp(mtp_layers=0, loss_scale=0.1)
    with pytest.raises(ConfigError, match="num_nextn_predict_layers: 2 is not supported; allowed: 0, 1"):
        check_mtp(mtp_layers=2)


def pretrain(**sections: dict) -> PretrainConfig:
    plain = {"run_dir": "out", "data": {"path": "x"}, "train": {"steps": 10}, "checkpoint": {"load": "hf"}}
    return build_config(PretrainConfig, plain | sections)


def test_fla_needs_a_gpu_and_the_package():
    config = pretrain(model={"kda": "fla"})
    with pytest.raises(ConfigError, match="model.kda: 'fla' needs a CUDA device.*allowed: torch"):
        check_backends(config, has_gpu=False, installed=lambda module: True)
    with pytest.raises(ConfigError, match="model.kda: 'fla' needs the module 'fla'.*pip install fla-core"):
        check_backends(config, has_gpu=True, installed=lambda module: False)
    check_backends(config, has_gpu=True, installed=lambda module: module == "fla")


TE = {"backend": "te", "experts": "grouped"}


def test_transformer_engine_and_apex_need_a_gpu_and_the_packages():
    te, apex = pretrain(model=TE), pretrain(optim={"fused": "apex"})
    for config, name, instead in ((te, "model.backend: 'te'", "local"), (apex, "optim.fused: 'apex'", "none")):
        check_backends(config, has_gpu=True, installed=lambda module: True)
        with pytest.raises(ConfigError, match=f"{name} needs a CUDA device and there is none here; allowed: {instead}"):
            check_backends(config, has_gpu=False, installed=lambda module: True)
    with pytest.raises(ConfigError, match="needs the module 'transformer_engine'; install it with: pip install"):
        check_backends(te, has_gpu=True, installed=lambda module: False)
    # An apex that was built without its extensions.
    with pytest.raises(ConfigError, match="needs the module 'amp_C'; install it with: APEX_CPP_EXT=1 APEX_CUDA_EXT=1"):
        check_backends(apex, has_gpu=True, installed=lambda module: module == "apex")


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({"model": {"backend": "te"}}, "model.backend: 'te' has no loop over experts; set model.experts=grouped"),
        ({"model": {"fp8": "blockwise"}}, "model.fp8: 'blockwise' needs model.backend=te"),
        ({"model": TE | {"fp8": "mxfp8", "dtype": "fp32"}}, "model.fp8: 'mxfp8' needs model.dtype=bf16"),
        ({"model": TE | {"fp8": "delayed"}}, "model.fp8: 'delayed' is not allowed; use one of"),
        ({"optim": {"fused": "apex", "offload": "cpu"}}, "optim.fused: 'apex' needs optim.offload=none"),
        ({"optim": {"fused": "apex", "name": "adamw8bit"}}, "optim.fused: 'apex' updates with optim.name=adamw only"),
    ],
)
def test_what_transformer_engine_and_apex_do_not_go_with(sections: dict, line: str):
    with pytest.raises(ConfigError) as caught:
        pretrain(**sections)
    assert caught.value.problems[0].startswith(line)
    pretrain(model=TE | {"fp8": "blockwise"})


def test_8_bit_states_need_the_package_and_no_gpu():
    config = pretrain(optim={"name": "adamw8bit"})
    with pytest.raises(ConfigError, match="optim.name: 'adamw8bit' needs the module 'torchao'.*pip install 'torchao"):
        check_backends(config, has_gpu=True, installed=lambda module: False)
    check_backends(config, has_gpu=False, installed=lambda module: module == "torchao")


@pytest.mark.parametrize(
    ("has_experts", "tp", "ep", "world_size"), [(True, 1, 1, 1), (True, 2, 2, 2), (True, 8, 8, 8), (False, 4, 1, 4)]
)
def test_8_bit_states_where_no_parameter_has_copies(has_experts: bool, tp: int, ep: int, world_size: int):
    check_optimizer(name="adamw8bit", has_experts=has_experts, tp=tp, ep=ep, world_size=world_size)


@pytest.mark.parametrize(
    ("tp", "ep", "world_size", "copies"),
    [(1, 1, 2, "dp=2, of experts 2"), (1, 2, 2, "dp=2, of experts 1"), (2, 1, 2, "dp=1, of experts 2")],
)
def test_8_bit_states_of_copies_are_refused(tp: int, ep: int, world_size: int, copies: str):
    layout = {"has_experts": True, "tp": tp, "ep": ep, "world_size": world_size}
    with pytest.raises(ConfigError) as caught:
        check_optimizer(name="adamw8bit", **layout)
    (line,) = caught.value.problems
    assert line.startswith("optim.name: 'adamw8bit' needs every parameter on one rank alone")
    assert f"parallel.tp={tp} parallel.ep={ep} makes {copies}; allowed here: parallel.tp=2 parallel.ep=2;" in line
    check_optimizer(name="adamw", **layout)


def test_two_ranks_hear_it_before_they_meet(monkeypatch: pytest.MonkeyPatch):
    arch = Architecture.from_hf(json.loads((FIXTURES / "moe" / "config.json").read_text()), "test")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(session, "build_context", lambda *_: pytest.fail("process groups were formed"))
    with pytest.raises(ConfigError, match="optim.name: 'adamw8bit' needs every parameter on one rank alone .dp=1"):
        session.join_ranks(pretrain(optim={"name": "adamw8bit"}), arch)


def test_defaults_need_nothing_in_any_recipe():
    check_backends(pretrain(), has_gpu=False, installed=lambda module: False)
    score = {"run_dir": "out", "checkpoint": {"load": "hf"}, "input": "a", "output": "b"}
    check_backends(build_config(ScoreConfig, score), has_gpu=False, installed=lambda module: False)


def test_evaluated_depths_need_an_mtp_layer():
    check_eval_depth(3, 0.1)
    check_eval_depth(None, None)
    with pytest.raises(ConfigError, match="train.eval_depth: 3 needs an MTP loss"):
        check_eval_depth(3, None)
