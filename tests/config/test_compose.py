"""From conf/ and the command line to the plain dict that the schema validates."""

import pytest

from bailing_mtp.config import ConfigError, GenerateConfig, PretrainConfig, UserError, build_config
from bailing_mtp.log import logger
from recipes.compose import compose


def composed(*arguments: str) -> dict:
    return compose(PretrainConfig, "pretrain", list(arguments), run_dir="out")


def test_experiment_wins_over_groups_and_the_command_line_over_both():
    plain = composed("experiment=demo", "mtp=detached", "train.steps=7", "optim.lr=0.5")
    assert plain["mtp"]["detach"] is True and plain["mtp"]["objective"] == "soft"
    assert (plain["train"]["steps"], plain["optim"]["lr"]) == (7, 0.5)
    assert plain["train"]["microbatch_tokens"] == 1024
    assert plain["model"]["architecture"]["num_experts"] == 16


def test_chosen_model_leaves_nothing_of_the_experiments_own():
    architecture = composed("experiment=demo", "model=ling3_flash")["model"]["architecture"]
    assert architecture["q_lora_rank"] is None and architecture["hidden_size"] == 2560
    assert composed("experiment=demo", "model=checkpoint")["model"]["architecture"] is None


@pytest.mark.parametrize(
    "text",
    ["reasoning_gym:chain_sum,gcd", "a dir/with=sign.jsonl", "007", "it's.jsonl", "true", "a:b,c=[1]"],
)
def test_a_text_key_takes_any_text(text: str):
    assert composed("experiment=demo", f"data.path={text}")["data"]["path"] == text


def test_a_list_of_texts_is_a_list():
    arguments = ["checkpoint.load=c", "prompts=p", "output=o", "sampling.stop_strings=['a b','c,d','\n']"]
    plain = compose(GenerateConfig, "generate", [*arguments, "sampling.stop_token_ids=[3,4]"], run_dir="out")
    sampling = build_config(GenerateConfig, plain).sampling
    assert sampling.stop_strings == ("a b", "c,d", "\n") and sampling.stop_token_ids == (3, 4)
    none = compose(GenerateConfig, "generate", ["sampling.stop_strings=[]"], run_dir="out")
    assert none["sampling"]["stop_strings"] == []


def test_null_and_interpolation_still_work_in_a_text_key():
    plain = composed("experiment=demo", "data.tokenizer=null", "data.path=x", "checkpoint.load=ckpt_${seed}")
    assert plain["data"]["tokenizer"] is None and plain["checkpoint"]["load"] == "ckpt_0"


def test_key_without_a_value_is_left_out():
    plain = composed("model=tiny")
    assert "path" not in plain["data"] and "steps" not in plain["train"]
    with pytest.raises(ConfigError) as caught:
        build_config(PretrainConfig, plain)
    assert [line.split(":")[0] for line in caught.value.problems] == ["data.path", "train.steps"]


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ("mtp.loss_scal=1", "mtp.loss_scal: unknown key; did you mean mtp.loss_scale?"),
        ("+model.foo=1", "model.foo: unknown key; allowed here: model.name, model.dtype"),
        ("modle.dtype=fp32", "modle.dtype: unknown key; did you mean model.dtype?"),
        ("model=", "model: nothing is no choice; use one of checkpoint, ling3_flash, ling3_tiny, tiny"),
        ("log=null", "log: null is no choice; use one of online, quiet"),
        ("parallel.cp=2", "parallel.cp: context parallelism is not part of this project"),
        ("optim.lr=${nothing}", "optim.lr: Interpolation key 'nothing' not found"),
    ],
)
def test_bad_override_is_named(argument: str, line: str):
    with pytest.raises(ConfigError) as caught:
        composed("experiment=demo", argument)
    assert str(caught.value).startswith(line)


@pytest.mark.parametrize(
    ("argument", "needed"),
    [
        ("model=huge", ["model/huge", "ling3_tiny"]),
        ("optim.lr=1,2", ["optim.lr"]),
        ("train.steps", ["train.steps"]),
        ("--multirun", ["--multirun"]),
        ("--no-such-flag", ["--no-such-flag"]),
    ],
)
def test_what_hydra_refuses_comes_as_a_user_error(argument: str, needed: list[str]):
    with pytest.raises(UserError) as caught:
        composed("experiment=demo", argument)
    assert all(word in str(caught.value) for word in needed)
    assert not any(word in str(caught.value) for word in ("HYDRA_FULL_ERROR", "Traceback", "_bailing_v3"))


def test_flags_only_inform(capsys: pytest.CaptureFixture[str]):
    assert composed("--cfg", "job", "--package", "mtp", "experiment=demo") is None
    assert "loss_scale: 0.1" in capsys.readouterr().out


def test_hydra_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    composed("experiment=demo")
    assert list(tmp_path.iterdir()) == []


def test_the_librarys_log_lines_are_still_shown_after_composing(caplog: pytest.LogCaptureFixture):
    composed("experiment=demo")
    logger.warning("a reward failed")
    assert "a reward failed" in caplog.text
