"""The endless sequence of prompts: every prompt once an epoch, the same after a resume, nothing that cannot fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bailing_mtp.config import GrpoConfig, build_config
from bailing_mtp.contracts.samples import SamplingParams
from bailing_mtp.data.chat import PlainFormat
from bailing_mtp.data.prompts import PromptLoader
from bailing_mtp.data.records import open_records
from bailing_mtp.data.sources import BadLines
from bailing_mtp.data.tokenizer import Tokenizer, train_tokenizer
from bailing_mtp.errors import UserError
from bailing_mtp.rl.rewards import require_judgeable
from recipes.policy_prompts import Prompts, open_prompts
from recipes.sources import find_source
from tests.distributed.worlds import FIXTURES

PARAMS = SamplingParams(max_new_tokens=5)
LINES = [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(6)]
LINES.append({"messages": [{"role": "user", "content": "hi"}], "answer": None})


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["1 + 1 = 2"] * 5, 260)


def loader(tmp_path: Path, tokenizer: Tokenizer, lines: list | None = None, **options: object) -> PromptLoader:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in (LINES if lines is None else lines)))
    source = open_records(str(file), options.pop("bad_lines", "fail"))
    values = {"samples_per_prompt": 3, "most_tokens": 50, "seed": 4} | options
    return PromptLoader(source, PlainFormat(tokenizer), PARAMS, **values)


def texts(prompts: list, tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode(prompt.prompt_ids) for prompt in prompts]


def test_every_prompt_once_an_epoch_in_changing_order(tmp_path: Path, tokenizer: Tokenizer):
    found = loader(tmp_path, tokenizer)
    first, second = (texts(found.draw(7), tokenizer) for _ in range(2))
    expected = [line.get("prompt", "User: hi\nAssistant:") for line in LINES]
    assert sorted(first) == sorted(second) == sorted(expected) and first != second and first != expected
    across = found.draw(9)
    assert [prompt.index for prompt in across] == list(range(9)) and found.rollouts == 3
    assert all(prompt.samples_per_prompt == 3 and prompt.sampling == PARAMS for prompt in across)
    for prompt in across:
        text = tokenizer.decode(prompt.prompt_ids)
        assert prompt.record["answer"] == (None if "hi" in text else str(int(text[0]) + 1))
    assert texts(loader(tmp_path, tokenizer, seed=5).draw(7), tokenizer) != first


def test_continues_where_it_stood(tmp_path: Path, tokenizer: Tokenizer):
    whole = loader(tmp_path, tokenizer)
    whole.draw(5)
    state = json.loads(json.dumps(whole.state_dict()))
    rest = loader(tmp_path, tokenizer)
    rest.load_state_dict(state)
    assert [rest.draw(4) for _ in range(3)] == [whole.draw(4) for _ in range(3)] and rest.rollouts == 4
    with pytest.raises(UserError, match="prompts was"):
        loader(tmp_path, tokenizer, LINES[:3]).load_state_dict(state)
    with pytest.raises(UserError, match="seed was 4, now 5"):
        loader(tmp_path, tokenizer, seed=5).load_state_dict(state)


def test_what_is_no_prompt_or_too_long(tmp_path: Path, tokenizer: Tokenizer):
    lines = [*LINES[:2], {"prompt": "9" * 60}, {"answer": "3"}]
    with pytest.raises(UserError, match=r"prompts.jsonl:4: holds no prompt; allowed: one of prompt, messages"):
        loader(tmp_path, tokenizer, lines)
    found = loader(tmp_path, tokenizer, lines, bad_lines="skip")
    assert (len(found), found.n_too_long, found.n_skipped_lines) == (2, 1, 1)
    assert found.longest_tokens == len(tokenizer.encode("0 + 1 ="))
    with pytest.raises(UserError, match="no prompt of at most 3 tokens .2 are longer."):
        loader(tmp_path, tokenizer, LINES[:2], most_tokens=3)


@pytest.mark.parametrize(
    ("reward", "lacks"),
    [
        ("exact", 'has no "answer", which rl.reward=exact compares with'),
        ("math_verify", 'has no "answer", which rl.reward=math_verify compares with'),
        ("reasoning_gym", "it needs answer and metadata.source_dataset, which rl.reward=reasoning_gym compares with"),
    ],
)
def test_a_line_that_the_reward_could_not_judge_is_refused_at_the_start(
    tmp_path: Path, tokenizer: Tokenizer, reward: str, lacks: str
):
    good = {"prompt": "1 + 1 =", "answer": 2, "metadata": {"source_dataset": "chain_sum"}}
    source = FIXTURES / "moe"
    tokenizer.save(tmp_path / "tokenizer")

    def opened(*lines: dict, **more: dict) -> Prompts:
        file = tmp_path / "prompts.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        values = {"run_dir": "out", "checkpoint": {"load": str(source)}, "train": {"steps": 1}} | more
        data = {"path": str(file), "seq_tokens": 64, "tokenizer": str(tmp_path / "tokenizer"), "chat_template": "plain"}
        sampling = {"max_new_tokens": 9, "samples_per_prompt": 2} | more.get("sampling", {})
        config = build_config(GrpoConfig, values | {"data": data, "rl": {"reward": reward}, "sampling": sampling})
        return open_prompts(config, find_source(config))

    assert len(opened(good).train) == 1
    with pytest.raises(UserError) as caught:
        opened(good, {"prompt": "2 + 2 ="})
    assert "prompts.jsonl:2: " in str(caught.value) and lacks in str(caught.value)
    # What the engine would refuse, before there is one.
    with pytest.raises(UserError, match=r"^any prompt: sampling\.stop_token_ids: 9999 is no token; allowed: 0 to"):
        opened(good, sampling={"stop_token_ids": [9999]})
    long = good | {"prompt": "1 + 1 + 1 + 1 + 1 + 1 + 1 ="}
    least = opened(long).train.longest_tokens + 9
    assert len(opened(good, long, rollout={"context_tokens": least}).train) == 2
    with pytest.raises(UserError, match=rf"^rollout\.context_tokens: {least - 1} tokens do not .*at least {least}"):
        opened(good, long, rollout={"context_tokens": least - 1})
    with pytest.raises(UserError, match=r"^rollout\.context_tokens: 99999999; allowed: at most "):
        opened(good, rollout={"context_tokens": 99_999_999})


def test_the_users_own_reward_may_need_no_answer():
    require_judgeable("module:function", {"prompt": "x"})


def test_held_out_prompts_are_not_among_the_trained_ones(tmp_path: Path, tokenizer: Tokenizer):
    trained = loader(tmp_path, tokenizer, LINES[:4])
    held_out = loader(tmp_path, tokenizer, LINES[2:], apart_from=trained)
    assert texts(held_out.all(), tokenizer) == ["4 + 1 =", "5 + 1 =", "User: hi\nAssistant:"] and held_out.n_shared == 2
    assert held_out.all() == held_out.all() and [prompt.index for prompt in held_out.all()] == [0, 1, 2]
    with pytest.raises(UserError, match="at most 50 tokens .0 are longer, 2 of the others are trained"):
        loader(tmp_path, tokenizer, LINES[2:4], apart_from=trained)


def test_generated_problems_have_a_held_out_split(tokenizer: Tokenizer):
    train, valid = (open_records("reasoning_gym:gcd?documents=50", split=split) for split in ("train", "valid"))
    questions = [{record["prompt"] for record, _ in source.records(BadLines())} for source in (train, valid)]
    assert all(len(found) == 50 for found in questions) and not questions[0] & questions[1]


def test_generated_problems_keep_their_entries(tokenizer: Tokenizer):
    source = open_records("reasoning_gym:chain_sum?documents=3")
    found = PromptLoader(source, PlainFormat(tokenizer), PARAMS, 2, 500).draw(3)
    assert {prompt.record["metadata"]["source_dataset"] for prompt in found} == {"chain_sum"}
    assert all(prompt.record["question"] in tokenizer.decode(prompt.prompt_ids) for prompt in found)
