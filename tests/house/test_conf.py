"""Every file under conf/ is valid, and no default of the schema is repeated in it without need."""

import math
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import bailing_mtp.config as config_package
from bailing_mtp.config import (
    DataConfig,
    LayoutSizes,
    LogConfig,
    ModelConfig,
    MtpConfig,
    OptimConfig,
    ParallelConfig,
    PretrainConfig,
    RlConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    Section,
    build_config,
    check_batch,
    check_layout,
    check_mtp,
    key_paths,
    schema_defaults,
)
from recipes.compose import CONF, compose

# A verb has conf/<verb>.yaml, recipes/<verb>.py and a <Verb>Config.
VERBS: dict[str, type[Section]] = {
    path.stem: getattr(config_package, f"{path.stem.capitalize()}Config") for path in CONF.glob("*.yaml")
}
GROUPS = {
    "model": ModelConfig,
    "data": DataConfig,
    "parallel": ParallelConfig,
    "optim": OptimConfig,
    "mtp": MtpConfig,
    "rollout": RolloutConfig,
    "rl": RlConfig,
    "sampling": SamplingConfig,
    "log": LogConfig,
}
# Keys that an experiment leaves to its user.
GIVEN_PATH, GIVEN_MODEL = "data.path=text.jsonl", "checkpoint.load=directory"

EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
GROUP_FILES = sorted(path for group in GROUPS for path in (CONF / group).glob("*.yaml"))
MODELS = sorted(path.stem for path in (CONF / "model").glob("[!_]*.yaml") if path.stem != "checkpoint")


def verb_of(experiment: str) -> str:
    """An experiment is named after its verb, <what>_<verb>; the demo pretrains."""
    last = experiment.rpartition("_")[2]
    return last if last in VERBS else "pretrain"


def composed(verb: str, *arguments: str) -> dict:
    defaults = {"run_dir": "out"} if issubclass(VERBS[verb], RunConfig) else {}
    return compose(VERBS[verb], verb, list(arguments), **defaults)


def layout_sizes(architecture: dict) -> LayoutSizes:
    return LayoutSizes(
        num_attention_heads=architecture["num_attention_heads"],
        vocab_size=architecture["vocab_size"],
        intermediate_size=architecture["intermediate_size"],
        moe_intermediate_size=architecture["moe_intermediate_size"],
        shared_intermediate_size=architecture["moe_shared_expert_intermediate_size"],
        num_experts=architecture["num_experts"],
    )


def test_every_primary_config_and_group_is_known():
    for verb in VERBS:
        assert (CONF.parent / "recipes" / f"{verb}.py").is_file(), verb
    assert {path.name for path in CONF.iterdir() if path.is_dir()} == {*GROUPS, "experiment"}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_experiment_composes_builds_and_fits(experiment: str):
    verb = verb_of(experiment)
    plain = composed(verb, f"experiment={experiment}")
    given = [GIVEN_PATH] if "data" in plain and "path" not in plain["data"] else []
    given += [GIVEN_MODEL] if plain["model"].get("architecture") is None else []
    config = build_config(VERBS[verb], composed(verb, f"experiment={experiment}", *given))
    if config.model.architecture is None:
        # The model comes from the checkpoint, and the tokens of a step from its rollouts.
        assert verb == "grpo"
        return
    world_size = math.lcm(config.parallel.tp, config.parallel.ep)
    dp = check_layout(
        layout_sizes(config.model.architecture),
        tp=config.parallel.tp,
        ep=config.parallel.ep,
        world_size=world_size,
    )
    if verb == "benchmark":
        return
    train = config.train
    check_batch(tokens_per_step=train.tokens_per_step, microbatch_tokens=train.microbatch_tokens, dp=dp)
    check_mtp(
        mtp_layers=config.model.architecture["num_nextn_predict_layers"], loss_scale=config.mtp.loss_scale
    )


@pytest.mark.parametrize("path", GROUP_FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_group_file_matches_its_section(path: Path):
    values = OmegaConf.to_container(OmegaConf.load(path))
    values.pop("defaults", None)
    build_config(GROUPS[path.parent.name], values)


@pytest.mark.parametrize("model", MODELS)
def test_models_share_one_set_of_keys(model: str):
    arguments = [f"model={model}", "data.path=x", "train.steps=10"]
    architecture = build_config(PretrainConfig, composed("pretrain", *arguments)).model.architecture
    reference = composed("pretrain", "model=ling3_tiny", *arguments[1:])["model"]["architecture"]
    assert set(architecture) == set(reference)
    assert architecture["num_experts"] % architecture["n_group"] == 0


def test_ling3_tiny_has_the_published_parameter_count():
    a = composed("pretrain", "model=ling3_tiny")["model"]["architecture"]
    hidden, heads, experts = a["hidden_size"], a["num_attention_heads"], a["num_experts"]
    inner = heads * a["head_dim"]
    kda = 6 * hidden * inner + hidden * heads + 3 * inner * a["short_conv_kernel_size"]
    kda += inner + heads + a["head_dim"]
    qk = a["qk_nope_head_dim"] + a["qk_rope_head_dim"]
    mla = a["q_lora_rank"] * (hidden + 1 + heads * qk) + hidden * (a["kv_lora_rank"] + a["qk_rope_head_dim"])
    mla += a["kv_lora_rank"] * (1 + heads * (a["qk_nope_head_dim"] + a["v_head_dim"]))
    mla += hidden * heads + heads * a["v_head_dim"] * hidden
    moe = 3 * hidden * (experts * a["moe_intermediate_size"] + a["moe_shared_expert_intermediate_size"])
    moe += experts * (hidden + 1)
    layers = a["num_hidden_layers"]
    trunk = layers // a["layer_group_size"] * (mla + (a["layer_group_size"] - 1) * kda)
    trunk += (layers - 1) * moe + 3 * hidden * a["intermediate_size"] + 2 * layers * hidden
    trunk += hidden + 2 * a["vocab_size"] * hidden
    mtp = mla + moe + 5 * hidden + 2 * hidden * hidden
    assert (trunk, mtp, trunk + mtp) == (7_893_392_800, 316_604_800, 8_209_997_600)


@pytest.mark.parametrize("verb", VERBS)
def test_every_key_can_be_overridden_without_a_plus(verb: str):
    defaults = schema_defaults(VERBS[verb], required="x")
    leaves = [path for path in key_paths(VERBS[verb]) if not isinstance(value_at(defaults, path), dict)]
    plain = composed(verb, *(f"{path}=1" for path in leaves))
    assert {str(value_at(plain, path)) for path in leaves} == {"1"}


def test_pretrain_without_choices_leaves_the_schema_defaults():
    plain = composed("pretrain")
    defaults = schema_defaults(PretrainConfig, required=None)
    for path in key_paths(PretrainConfig):
        default = value_at(defaults, path)
        if default is not None and not isinstance(default, dict):
            assert value_at(plain, path) == default, path


def value_at(plain: dict, path: str) -> object:
    for name in path.split("."):
        plain = plain[name]
    return plain
