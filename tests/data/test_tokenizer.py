from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bailing_mtp.data.sources import Document
from bailing_mtp.data.tokenizer import EOS_TOKEN, Tokenizer, load_tokenizer, train_tokenizer


def test_decode_gives_back_any_text(tokenizer: Tokenizer, corpus_documents: list[Document]) -> None:
    texts = [document.text for document in corpus_documents[:20]] + [
        "Gr\u00fc\u00dfe \u4f60\u597d \U0001f600\n\ttab  two"
    ]
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(texts)] == texts


def test_training_learns_merges_and_repeats_itself(
    tokenizer: Tokenizer, corpus_documents: list[Document]
) -> None:
    again = train_tokenizer((document.text for document in corpus_documents), vocab_size=512)
    assert again.digest == tokenizer.digest
    assert len(tokenizer.encode("Question: Find the Greatest Common Divisor")) < 15


def test_digits_are_single_tokens() -> None:
    tokenizer = train_tokenizer(["2048 2048 2048"], 300)
    assert [tokenizer.decode([i]) for i in tokenizer.encode("2048")] == ["2", "0", "4", "8"]


def test_small_text_gives_fewer_ids_than_asked() -> None:
    small = train_tokenizer(["aaaa bbbb"], vocab_size=4096)
    assert 258 <= small.size < 300
    assert max(small.encode("aaaa bbbb zz\xff")) < 4096
    small.require_fits(4096)
    with pytest.raises(ValueError, match=f"vocab_size is 100; allowed: a vocab_size >= {small.size}"):
        small.require_fits(100)


@pytest.mark.parametrize("vocab_size", [0, 257])
def test_vocabulary_must_hold_all_bytes(vocab_size: int) -> None:
    with pytest.raises(ValueError, match=rf"vocab_size: {vocab_size}; allowed: >= 258"):
        train_tokenizer(["text"], vocab_size)


def test_spelled_out_special_token_ends_nothing_unless_asked(tokenizer: Tokenizer) -> None:
    text = f"a{EOS_TOKEN}b"
    plain, parsed = tokenizer.encode(text), tokenizer.encode(text, parse_special=True)
    assert tokenizer.eos_id not in plain
    assert tokenizer.decode(plain) == text
    assert parsed.count(tokenizer.eos_id) == 1
    assert tokenizer.encode(text) == plain
    assert tokenizer.decode(parsed) == "ab"
    assert tokenizer.decode(parsed, skip_special=False) == text


def test_ids_above_the_tokenizer_decode_to_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([*tokenizer.encode("yes"), 100_000]) == "yes"


def test_saved_tokenizer_loads_alike(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = load_tokenizer(path)
        assert (loaded.digest, loaded.eos_ids, loaded.pad_id) == (tokenizer.digest, (0,), 1)
        assert loaded.encode("gcd of 12 and 18") == tokenizer.encode("gcd of 12 and 18")


def test_save_keeps_foreign_settings(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "first")
    settings = json.loads((tmp_path / "first/tokenizer_config.json").read_text())
    (tmp_path / "first/tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "x"}))
    load_tokenizer(tmp_path / "first").save(tmp_path / "second")
    assert json.loads((tmp_path / "second/tokenizer_config.json").read_text())["chat_template"] == "x"


def _bare(tokenizer: Tokenizer, directory: Path, /, **files: object) -> Path:
    tokenizer.save(directory)
    (directory / "tokenizer_config.json").unlink()
    for name, value in files.items():
        (directory / f"{name}.json").write_text(json.dumps(value))
    return directory


def test_end_ids_come_from_the_model_config_when_alone(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = _bare(tokenizer, tmp_path, config={"eos_token_id": [5, 7], "pad_token_id": 9})
    loaded = load_tokenizer(path)
    assert (loaded.eos_id, loaded.eos_ids, loaded.pad_id) == (5, (5, 7), 9)


def test_named_end_token_goes_first(tokenizer: Tokenizer, tmp_path: Path) -> None:
    settings = {"eos_token": {"content": EOS_TOKEN}}
    loaded = load_tokenizer(_bare(tokenizer, tmp_path, config={"eos_token_id": 5}, tokenizer_config=settings))
    assert (loaded.eos_ids, loaded.pad_id) == ((0, 5), 0)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no end-of-text token"),
        ({"tokenizer_config": {"eos_token": "<nope>"}}, r"tokenizer_config.json: eos_token: '<nope>'"),
        ({"config": {"eos_token_id": "5"}}, r"config.json: eos_token_id: '5'; allowed"),
        ({"config": {"eos_token_id": 9999}}, "id 9999 is no token"),
        ({"config": {"eos_token_id": -1}}, "id -1 is no token"),
        ({"config": [1]}, "config.json: holds a list"),
        ({"tokenizer": {"a": 1}}, "tokenizer.json: has no 'model'"),
    ],
)
def test_wrong_files_are_named(
    tokenizer: Tokenizer, tmp_path: Path, files: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_tokenizer(_bare(tokenizer, tmp_path, **files))


def test_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path))):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer.json: not valid JSON"):
        load_tokenizer(tmp_path)
