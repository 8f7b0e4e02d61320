"""Lines of a prompts file, and the config of the verb."""

import dataclasses
import json
from pathlib import Path

import pytest

from bailing_mtp.config import ConfigError, GenerateConfig, SamplingConfig, build_config, check_backends
from bailing_mtp.data.chat import open_format
from bailing_mtp.data.tokenizer import Tokenizer, train_tokenizer
from bailing_mtp.errors import UserError
from recipes.compose import compose
from recipes.prompts import PromptReader


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["a few words to train on, and 12 more"], 300)


def reader(tokenizer: Tokenizer | None, directory: Path = Path("."), **sampling: object) -> PromptReader:
    """Of a model of 512 ids and 300 positions."""
    return PromptReader(
        SamplingConfig(**sampling), 6, tokenizer, lambda: open_format("plain", tokenizer, directory), 512, 300
    )


def lines(path: Path, *records: object) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records), encoding="utf-8")
    return path


def test_three_forms_and_own_sampling(tmp_path: Path, tokenizer: Tokenizer):
    file = lines(
        tmp_path / "p.jsonl",
        {"prompt": "a few"},
        "",
        {"messages": [{"role": "user", "content": "words"}]},
        {"prompt_ids": [5, 6], "sampling": {"temperature": 0, "seed": 9, "samples_per_prompt": 3}, "answer": "x"},
    )
    text, chat, ids = reader(tokenizer, tmp_path, top_p=0.5, stop_token_ids=(7,)).read(file)
    assert tokenizer.decode(text.prompt_ids) == "a few" and text.sampling.seed == 6
    assert tokenizer.decode(chat.prompt_ids) == "User: words\nAssistant:"
    assert ids.prompt_ids == (5, 6) and ids.samples_per_prompt == 3 and ids.record["answer"] == "x"
    assert (ids.sampling.temperature, ids.sampling.seed, ids.sampling.top_p) == (0.0, 9, 0.5)
    assert ids.sampling.stop_token_ids == (7,) and [p.index for p in (text, chat, ids)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "x"}, "p.jsonl:1: holds no prompt; allowed: one of prompt, messages, prompt_ids"),
        ({"prompt": "x", "prompt_ids": [1]}, "holds prompt and prompt_ids"),
        ({"prompt_ids": [1.5]}, '"prompt_ids" is no list of integers'),
        ({"prompt_ids": [True]}, '"prompt_ids" is no list of integers'),
        ({"prompt": "x"}, 'p.jsonl:1: "prompt" needs a tokenizer'),
        ({"prompt_ids": [1], "sampling": {"temprature": 1}}, "p.jsonl:1: sampling.temprature: unknown key"),
        ({"prompt_ids": [1], "sampling": {"top_p": 0}}, "p.jsonl:1: sampling.top_p: 0 is not allowed"),
        ({"prompt_ids": [1], "sampling": {"seed": 2**32}}, "p.jsonl:1: sampling.seed: 4294967296; allowed: 0 to"),
        (
            {"prompt_ids": [1], "sampling": {"min_new_tokens": 300}},
            "p.jsonl:1: sampling.max_new_tokens: 256; allowed: at least min_new_tokens, 300",
        ),
        ({"prompt_ids": [1], "sampling": 3}, '"sampling" is no object'),
        ({"prompt_ids": [1, 512]}, "p.jsonl:1: prompt_ids: 512 is no token; allowed: 0 to 511"),
        ({"prompt_ids": [-1]}, "p.jsonl:1: prompt_ids: -1 is no token"),
        ({"prompt_ids": []}, "p.jsonl:1: has no tokens"),
        ({"prompt_ids": [1], "sampling": {"stop_token_ids": [512]}}, "p.jsonl:1: sampling.stop_token_ids: 512 is no"),
        ({"prompt_ids": [1], "sampling": {"suppress_token_ids": [512]}}, "p.jsonl:1: sampling.suppress_token_ids: 512"),
        ({"prompt_ids": [1], "sampling": {"stop_strings": ["x"]}}, "p.jsonl:1: sampling.stop_strings need a tokenizer"),
        ({"prompt_ids": [1] * 45}, "45 prompt tokens and sampling.max_new_tokens=256 exceed the model's 300 positions"),
        ([1], "p.jsonl:1: holds no prompt"),
        ("{", "p.jsonl:1: not valid JSON"),
        ("", "holds no prompt"),
    ],
)
def test_bad_lines_name_file_and_line(tmp_path: Path, record: object, message: str):
    with pytest.raises(UserError) as caught:
        reader(None).read(lines(tmp_path / "p.jsonl", record))
    # Such lines are never left out here.
    assert message in str(caught.value) and "data.bad_lines" not in str(caught.value)


def test_a_line_that_is_not_utf8_and_one_that_is_longer_than_the_context(tmp_path: Path):
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt_ids": [1]}\n{"prompt": "\xff"}')
    with pytest.raises(UserError, match=r"p\.jsonl:2: not UTF-8 at byte 12$"):
        reader(None).read(tmp_path / "p.jsonl")
    file = lines(tmp_path / "p.jsonl", {"prompt_ids": [1, 2], "sampling": {"max_new_tokens": 9}})
    narrow = dataclasses.replace(reader(None), context_tokens=10)
    told = r"p\.jsonl:1: 2 prompt tokens and sampling.max_new_tokens=9 exceed rollout.context_tokens=10$"
    with pytest.raises(UserError, match=told):
        narrow.read(file)
    assert len(dataclasses.replace(narrow, context_tokens=11).read(file)) == 1


def config(*arguments: str) -> GenerateConfig:
    given = ["checkpoint.load=x", "prompts=a.jsonl", "output=b.jsonl", *arguments]
    return build_config(GenerateConfig, compose(GenerateConfig, "generate", given, run_dir="out"))


def test_config():
    assert config().rollout.speculative_tokens == 0 and config().sampling.temperature == 1.0
    with pytest.raises(ConfigError, match="output: 'a.jsonl' is also prompts"):
        config("output=a.jsonl")


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ("rollout.adaptive=true", "rollout.adaptive: true needs rollout.speculative_tokens > 0"),
        ("rollout.draft_vocabulary=v.json", "rollout.draft_vocabulary: 'v.json' needs rollout.speculative_tokens > 0"),
    ],
)
def test_settings_of_drafts_need_drafts(argument: str, line: str):
    check_backends(config(argument, "rollout.speculative_tokens=1"), has_gpu=False)
    with pytest.raises(ConfigError) as caught:
        config(argument)
    assert caught.value.problems[0].startswith(line)


def test_triton_kernels_and_graphs_need_a_gpu_and_each_other():
    fast = config("rollout.kernels=triton", "rollout.cuda_graphs=true")
    check_backends(fast, has_gpu=True)
    with pytest.raises(ConfigError) as caught:
        check_backends(fast, has_gpu=False)
    assert caught.value.problems == (
        "rollout.kernels: 'triton' needs a CUDA device and there is none here; allowed: torch",
        "rollout.cuda_graphs: true needs a CUDA device and there is none here; allowed: false",
    )
    with pytest.raises(ConfigError, match="rollout.kernels: 'triton' needs the module 'triton'; install it with"):
        check_backends(fast, has_gpu=True, installed=lambda module: False)
    with pytest.raises(ConfigError, match="rollout.cuda_graphs: true needs rollout.kernels=triton, and it is torch"):
        config("rollout.cuda_graphs=true")
