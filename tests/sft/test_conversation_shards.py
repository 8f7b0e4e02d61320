"""From JSONL conversations to packed batches: masks, limits, bad lines, and what the MTP layer may learn from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bailing_mtp.contracts.batch import TokenBatch
from bailing_mtp.data.chat import PlainFormat
from bailing_mtp.data.dialogues import CUT, LEFT_OUT, DialogueOptions, open_conversation_shards
from bailing_mtp.data.loader import PackedLoader
from bailing_mtp.data.packing import TokenDocument, make_batch
from bailing_mtp.data.records import open_records
from bailing_mtp.data.shards import TokenShards
from bailing_mtp.data.sources import BadDocument
from bailing_mtp.data.tokenizer import Tokenizer, train_tokenizer
from bailing_mtp.errors import UserError


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["q"], 258)


def shards_of(
    tokenizer: Tokenizer, directory: Path, lines: list[Any], policy: str = "fail", **options: Any
) -> TokenShards:
    file = directory / "lines.jsonl"
    if not file.exists():
        file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    how = DialogueOptions(tokenizer, PlainFormat(tokenizer), **{"seq_tokens": 8, **options})
    return open_conversation_shards(open_records(str(file), policy), how, directory / "cache")


def pair(prompt: str, response: str) -> dict[str, str]:
    return {"prompt": prompt, "response": response}


def test_masks_come_back_from_disk(tokenizer: Tokenizer, tmp_path: Path):
    shards = shards_of(tokenizer, tmp_path, [pair("ab", "xyz"), pair("c", "d")])
    assert [tokenizer.decode(shards.document(i)) for i in (0, 1)] == ["abxyz", "cd"]
    assert [shards.mask(i).tolist() for i in (0, 1)] == [[0, 0, 1, 1, 1, 1], [0, 1, 1]]
    assert shards.origin(1) == f"{tmp_path}/lines.jsonl:2"
    (batch,) = PackedLoader(shards, 12, 8, valid_fraction=0).next_step()
    trained = [batch.input_ids_T[t] for t in range(12) if batch.loss_mask_T[t]]
    assert sorted(tokenizer.decode(trained)) == list("dxyz")
    assert int(batch.loss_mask_T.sum()) == 6 and batch.mtp_mask_T is None


@pytest.mark.parametrize(
    ("too_long", "texts", "notes"),
    [("cut", ["abcdexyz", "cd"], {CUT: 1, LEFT_OUT: 1}), ("skip", ["cd"], {LEFT_OUT: 2})],
)
def test_too_long_is_cut_or_left_out_and_counted(
    tokenizer: Tokenizer, tmp_path: Path, too_long: str, texts: list[str], notes: dict[str, int]
):
    lines = [pair("abcde", "xyzuvw"), pair("c", "d"), pair("a prompt alone too long", "x")]
    shards = shards_of(tokenizer, tmp_path, lines, too_long=too_long)
    assert [tokenizer.decode(shards.document(i)) for i in range(shards.n_documents)] == texts
    assert shards.notes == notes
    assert shards.document(0).size <= 8


def test_bad_lines_name_file_and_line_or_are_counted(tokenizer: Tokenizer, tmp_path: Path):
    lines = [pair("a", "b"), "{broken", {"messages": [{"role": "user", "content": "x"}]}]
    with pytest.raises(BadDocument, match=r"lines.jsonl:2: not valid JSON"):
        shards_of(tokenizer, tmp_path, lines)
    shards = shards_of(tokenizer, tmp_path, lines, policy="skip")
    assert (shards.n_documents, shards.n_skipped_lines) == (1, 2) and "lines.jsonl:2" in shards.first_skipped


def test_changed_options_make_other_shards(tokenizer: Tokenizer, tmp_path: Path):
    lines = [pair("abcde", "xyzuvw")]
    short, long = (shards_of(tokenizer, tmp_path, lines, seq_tokens=n) for n in (8, 32))
    assert short.directory != long.directory and (short.n_tokens, long.n_tokens) == (8, 12)
    assert short.content_digest != long.content_digest
    assert shards_of(tokenizer, tmp_path, lines).directory == short.directory


def test_text_files_and_generated_problems(tokenizer: Tokenizer, tmp_path: Path):
    (tmp_path / "a.txt").write_text("text")
    how = DialogueOptions(tokenizer, PlainFormat(tokenizer), seq_tokens=400)
    with pytest.raises(UserError, match="holds no .jsonl file"):
        open_conversation_shards(open_records(str(tmp_path / "a.txt")), how, tmp_path / "cache")
    shards = open_conversation_shards(open_records("reasoning_gym:gcd?documents=3"), how, tmp_path / "cache")
    assert shards.n_documents == 3
    text, mask = tokenizer.decode(shards.document(2)), shards.mask(2)
    prompt, _, answer = text.rpartition("Answer:")
    assert prompt.startswith("Question: ") and int(answer) > 0
    assert int(mask.sum()) == len(answer) + 1 and not mask[: -len(answer) - 1].any()


def response_batch(n_prompt: int, n_response: int) -> TokenBatch:
    mask = np.array([False] * n_prompt + [True] * n_response)
    return make_batch([TokenDocument(np.arange(len(mask)), "d", mask)], len(mask), len(mask))


def test_mtp_sites_are_those_whose_target_is_a_response_token():
    """A prompt of 4 and a response of 3 tokens: t+1 and t+2 must lie in the response (tokens 4, 5, 6)."""
    batch = response_batch(4, 3)
    sites = [batch.shift(depth).valid_T.nonzero().flatten().tolist() for depth in range(4)]
    assert sites == [[3, 4, 5], [2, 3, 4], [1, 2, 3], [0, 1, 2]]
    for depth in range(4):
        shift = batch.shift(depth)
        assert shift.target_ids_T[shift.valid_T].tolist() == [4, 5, 6]


def test_prompt_sites_have_no_part_in_a_masked_mean():
    """Four fifths of the row are prompt: whatever is predicted there changes no sum."""
    batch = response_batch(8, 2)
    loss_T = torch.arange(10.0)
    for depth in (0, 1):
        valid_T = batch.shift(depth).valid_T
        poisoned = torch.where(torch.arange(10) < 7 - depth, torch.nan, loss_T)
        assert torch.where(valid_T, poisoned, 0.0).sum() == torch.where(valid_T, loss_T, 0.0).sum()
        assert int(valid_T.sum()) == 2
