"""Every kind of mistake in a config ends as one line that names the key, the value and what is allowed."""

import copy
import math
import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from bailing_mtp.config import (
    ConfigError,
    DpoConfig,
    PretrainConfig,
    RlConfig,
    RolloutConfig,
    SamplingConfig,
    ScoreConfig,
    Section,
    UserError,
    build_config,
    key_paths,
    schema_defaults,
    text_keys,
)

MINIMAL = {
    "run_dir": "out",
    "model": {"architecture": {"hidden_size": 8}},
    "data": {"path": "text.jsonl"},
    "train": {"steps": 10},
}


def plain_with(path: str, value: Any) -> dict[str, Any]:
    plain = copy.deepcopy(MINIMAL)
    node = plain
    *parents, leaf = path.split(".")
    for name in parents:
        node = node.setdefault(name, {})
    node[leaf] = value
    return plain


def problems_of(path: str, value: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        build_config(PretrainConfig, plain_with(path, value))
    return caught.value.problems


def test_minimal_config_takes_every_default_from_the_schema():
    config = build_config(PretrainConfig, copy.deepcopy(MINIMAL))
    expected = schema_defaults(PretrainConfig, required=None)
    for section, values in MINIMAL.items():
        expected[section] = {**expected[section], **values} if isinstance(values, dict) else values
    assert config.model_dump() == expected
    assert config.mtp.loss_scale is None and config.mtp.detach is False


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        ("model.dtype", "fp8", "model.dtype: 'fp8' is not allowed; use one of fp32, bf16"),
        ("optim.schedule", None, "optim.schedule: null is not allowed; use one of constant, cosine, wsd"),
        ("train.step", 3, "train.step: unknown key; did you mean train.steps?"),
        ("tp", 2, "tp: unknown key; did you mean parallel.tp?"),
        ("modle", {}, "modle: unknown key; did you mean model?"),
        ("parallel.sp", 2, "parallel.sp: unknown key; allowed here: parallel.tp, parallel.ep"),
        ("parallel.pp", 2, "parallel.pp: pipeline parallelism is not part of this project"),
        ("parallel.cp", 2, "parallel.cp: context parallelism is not part of this project"),
        ("seed", -1, "seed: -1 is not allowed; must be at least 0"),
        ("train.steps", "ten", "train.steps: 'ten' is not allowed; must be an integer"),
        ("train.steps", 2.5, "train.steps: 2.5 is not allowed; must be an integer"),
        ("train.steps", True, "train.steps: true is not allowed; must be an integer"),
        ("optim.lr", "1e-3", "optim.lr: '1e-3' is not allowed; must be a number"),
        ("optim.lr", math.inf, "optim.lr: inf is not allowed; must be a finite number"),
        ("optim.beta2", 1, "optim.beta2: 1 is not allowed; must be below 1"),
        ("mtp.detach", "yes", "mtp.detach: 'yes' is not allowed; must be true or false"),
        ("mtp.depth", 0, "mtp.depth: 0 is not allowed; must be above 0"),
        ("mtp.depth_decay", 1.5, "mtp.depth_decay: 1.5 is not allowed; must be at most 1"),
        ("mtp.loss_scale", 0, "mtp.loss_scale: 0 is not allowed; must be above 0, or null"),
        ("mtp.loss_scale", -0.1, "mtp.loss_scale: -0.1 is not allowed; must be above 0, or null"),
        ("mtp.loss_scale", math.nan, "mtp.loss_scale: nan is not allowed; must be a finite number, or null"),
        ("data.path", "", "data.path: '' is not allowed; must be a text that is not empty"),
        ("data", "file.jsonl", "data: 'file.jsonl' is not allowed; must be a mapping"),
        ("data", {}, "data.path: is required and has no default"),
        ("optim.warmup_steps", 10, "optim.warmup_steps: 10 must be below train.steps=10"),
        ("optim.decay_steps", 11, "optim.decay_steps: 11 does not fit after"),
        ("data.seq_tokens", 9000, "train.microbatch_tokens: 4096 cannot hold a document of data.seq_t"),
        ("model.architecture", None, "model.architecture: null needs checkpoint.load=<directory>"),
    ],
)
def test_mistake_is_named_with_value_and_allowed(path: str, value: Any, line: str):
    problems = problems_of(path, value)
    assert len(problems) == 1
    assert problems[0].startswith(line)
    assert "\n" not in problems[0] and "pydantic" not in problems[0]


def test_all_mistakes_are_told_at_once():
    plain = plain_with("seed", -1)
    plain["parallel"] = {"tp": 0}
    with pytest.raises(ConfigError) as caught:
        build_config(PretrainConfig, plain)
    assert [line.split(":")[0] for line in caught.value.problems] == ["seed", "parallel.tp"]
    assert isinstance(caught.value, UserError) and isinstance(caught.value, ValueError)


def test_8_bit_states_stay_on_the_device():
    plain = plain_with("optim", {"name": "adamw8bit", "offload": "cpu"})
    with pytest.raises(ConfigError, match="^optim.offload: 'cpu' is not supported with optim.name=adamw8bit.*: none$"):
        build_config(PretrainConfig, plain)


def test_integer_stands_for_a_float_and_list_for_a_tuple():
    assert build_config(PretrainConfig, plain_with("mtp.loss_scale", 1)).mtp.loss_scale == 1.0
    assert build_config(SamplingConfig, {"stop_token_ids": [3, 4]}).stop_token_ids == (3, 4)
    with pytest.raises(ConfigError, match=r"stop_token_ids\.1: 'x' is not allowed; must be an integer"):
        build_config(SamplingConfig, {"stop_token_ids": [3, "x"]})
    with pytest.raises(ConfigError, match="stop_token_ids: 3 is not allowed; must be a list"):
        build_config(SamplingConfig, {"stop_token_ids": 3})


def test_reward_has_a_form():
    assert build_config(RlConfig, {"reward": "my.rewards:score"}).reward == "my.rewards:score"
    with pytest.raises(ConfigError, match="reward: 'judge' is not allowed.*module:function"):
        build_config(RlConfig, {"reward": "judge"})


def test_score_refuses_to_write_over_its_input():
    plain = {"run_dir": "out", "checkpoint": {"load": "hf"}, "input": "a", "output": "a"}
    with pytest.raises(ConfigError, match="output: 'a' is also the input"):
        build_config(ScoreConfig, plain)
    assert build_config(ScoreConfig, {**plain, "output": "b"}).write_logits is False


def test_config_is_frozen():
    config = build_config(PretrainConfig, copy.deepcopy(MINIMAL))
    with pytest.raises(ValidationError):
        config.parallel.tp = 2


def test_key_paths_and_text_keys():
    paths = key_paths(PretrainConfig)
    assert {"mtp", "mtp.depth_decay", "optim.expert_bias_rate", "run_dir"} <= set(paths)
    texts = text_keys(PretrainConfig)
    assert {"run_dir", "data.path", "data.tokenizer", "checkpoint.load"} <= texts
    assert not {"model.dtype", "model.architecture", "train.steps", "mtp"} & texts


def test_every_key_is_described():
    def sections(cls: type[Section]) -> list[type[Section]]:
        below = [field.annotation for field in cls.model_fields.values()]
        return [cls, *(kind for kind in below if isinstance(kind, type) and issubclass(kind, Section))]

    for root in (PretrainConfig, ScoreConfig, RolloutConfig, SamplingConfig, RlConfig, DpoConfig):
        for section in sections(root):
            for name, field in section.model_fields.items():
                assert field.description, f"{section.__name__}.{name}"


def test_config_imports_neither_torch_nor_hydra():
    code = "import sys, bailing_mtp.config; print(sorted({'torch', 'hydra', 'omegaconf'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
