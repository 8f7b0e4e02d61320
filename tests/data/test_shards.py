from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from bailing_mtp.data.cache import CacheError
from bailing_mtp.data.shards import ShardError, TokenShards, open_shards, read_shards
from bailing_mtp.data.sources import BadDocument, BadLines, Document, open_source
from bailing_mtp.data.tokenizer import Tokenizer, train_tokenizer
from bailing_mtp.log import ProgressLine

TEXTS = ["first text", "second", "third one \u00e9"]


@dataclass
class ListSource:
    """Documents from memory; counts readings and can do something before the last document."""

    texts: list[str] = field(default_factory=lambda: list(TEXTS))
    before_last: Callable[[], None] = lambda: None
    path: str = "memory"
    policy: str = "fail"
    n_readings: int = 0

    def identity(self) -> str:
        return "|".join(self.texts)

    def documents(self, bad_lines: BadLines) -> Iterator[Document]:
        self.n_readings += 1
        texts = list(self.texts)
        for index, text in enumerate(texts):
            if index == len(texts) - 1:
                self.before_last()
            yield Document(text, f"memory:{index}")


def _texts(shards: TokenShards, tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode(shards.document(index)) for index in range(shards.n_documents)]


def test_shards_hold_the_documents(tokenizer: Tokenizer, tmp_path: Path) -> None:
    shards = open_shards(ListSource(), tokenizer, tmp_path)
    expected = [[*tokenizer.encode(text), tokenizer.eos_id] for text in TEXTS]
    assert [shards.document(index).tolist() for index in range(3)] == expected
    assert [shards.origin(index) for index in range(3)] == ["memory:0", "memory:1", "memory:2"]
    assert (shards.n_documents, shards.n_tokens) == (3, sum(map(len, expected)))
    assert shards.max_token_id == max(map(max, expected))
    assert (shards.tokens.dtype, shards.offsets.dtype) == (np.uint32, np.int64)
    assert shards.document(2, 1, 2).tolist() == expected[2][1:3]
    assert shards.document(0, 2, 100).tolist() == expected[0][2:]


def test_generated_corpus_comes_back(
    shards: TokenShards, tokenizer: Tokenizer, corpus_documents: list[Document]
) -> None:
    assert _texts(shards, tokenizer) == [document.text for document in corpus_documents]
    assert shards.origin(4) == "reasoning_gym:gcd#1"


def test_second_opening_reads_no_document(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = ListSource()
    first = open_shards(source, tokenizer, tmp_path)
    second = open_shards(source, tokenizer, tmp_path)
    assert source.n_readings == 1
    assert second.content_digest == first.content_digest
    assert _texts(second, tokenizer) == TEXTS


def test_other_documents_or_tokenizer_are_built_anew(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source, other = ListSource(), ListSource(["other"])
    first = open_shards(source, tokenizer, tmp_path)
    assert _texts(open_shards(other, tokenizer, tmp_path), tokenizer) == ["other"]
    smaller = train_tokenizer(TEXTS, 258)
    again = open_shards(source, smaller, tmp_path)
    assert _texts(again, smaller) == TEXTS
    assert source.n_readings == 2
    assert again.content_digest != first.content_digest


def test_content_digest_does_not_depend_on_the_place(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text("same text")
    a, b = (open_shards(open_source(str(tmp_path / name)), tokenizer, tmp_path / "cache") for name in "ab")
    assert a.directory != b.directory
    assert a.content_digest == b.content_digest


def test_changed_file_is_read_again(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "x.txt"
    for text in ("one", "three"):
        file.write_text(text)
        assert _texts(open_shards(open_source(str(file)), tokenizer, tmp_path / "cache"), tokenizer) == [text]


def test_file_that_changes_while_it_is_read_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = ListSource()
    source.before_last = lambda: source.texts.append("late")
    with pytest.raises(ShardError, match="memory: changed while it was read"):
        open_shards(source, tokenizer, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_interrupted_build_leaves_nothing(tokenizer: Tokenizer, tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_shards(ListSource(before_last=interrupt), tokenizer, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert _texts(open_shards(ListSource(), tokenizer, tmp_path), tokenizer) == TEXTS


KILLED = """
import os, signal, sys
from bailing_mtp.data import shards, sources, tokenizer

class Source:
    path, policy = "memory", "fail"
    def identity(self):
        return {identity!r}
    def documents(self, bad_lines):
        yield sources.Document("wrong text", "memory:0")
        yield sources.Document("wrong text", "memory:1")
        os.kill(os.getpid(), signal.SIGKILL)

shards._BATCH_DOCUMENTS = 1
shards.open_shards(Source(), tokenizer.load_tokenizer(sys.argv[1]), sys.argv[2])
"""


def test_killed_build_is_never_read(tokenizer: Tokenizer, tmp_path: Path) -> None:
    cache_dir = tmp_path / "cache"
    tokenizer.save(tmp_path / "tokenizer")
    script = KILLED.format(identity=ListSource().identity())
    command = [sys.executable, "-c", script, str(tmp_path / "tokenizer"), str(cache_dir)]
    repository = Path(__file__).parents[2]
    assert subprocess.run(command, cwd=repository, check=False).returncode == -9
    (left,) = cache_dir.iterdir()
    assert (left / "tokens.bin").exists()
    shards = open_shards(ListSource(), tokenizer, cache_dir)
    assert _texts(shards, tokenizer) == TEXTS

    old_s = time.time() - 7 * 24 * 3600
    for entry in (left, *left.iterdir()):
        os.utime(entry, (old_s, old_s))
    open_shards(ListSource(["other"]), tokenizer, cache_dir)
    assert not left.exists()
    assert shards.directory.exists()


def test_two_builders_end_with_one_result(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rival = ListSource()
    source = ListSource(before_last=lambda: open_shards(rival, tokenizer, tmp_path))
    shards = open_shards(source, tokenizer, tmp_path)
    assert (source.n_readings, rival.n_readings) == (1, 1)
    assert _texts(shards, tokenizer) == TEXTS
    assert list(tmp_path.iterdir()) == [shards.directory]


def test_other_ranks_wait_and_do_not_read(tokenizer: Tokenizer, tmp_path: Path) -> None:
    waiting = ListSource()
    calls: list[str] = []

    def barrier() -> None:
        calls.append("barrier")
        open_shards(ListSource(), tokenizer, tmp_path)

    shards = open_shards(waiting, tokenizer, tmp_path, is_builder=False, barrier=barrier)
    assert (calls, waiting.n_readings) == (["barrier"], 0)
    assert _texts(shards, tokenizer) == TEXTS


def test_failed_build_releases_the_other_ranks(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n')
    source, calls = open_source(str(tmp_path)), []
    with pytest.raises(BadDocument, match=r"x.jsonl:2"):
        open_shards(source, tokenizer, tmp_path / "c", barrier=lambda: calls.append(0))
    with pytest.raises(CacheError, match="not there after the building rank finished"):
        open_shards(source, tokenizer, tmp_path / "c", is_builder=False, barrier=lambda: calls.append(1))
    assert calls == [0, 1]


def test_skipped_lines_are_told_at_every_opening(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n\n{\n{"text": "c"}\n')
    source, stream = open_source(str(tmp_path), bad_lines="skip"), io.StringIO()
    open_shards(source, tokenizer, tmp_path / "c", progress=ProgressLine(stream))
    shards = open_shards(source, tokenizer, tmp_path / "c")
    assert _texts(shards, tokenizer) == ["a", "c"]
    assert shards.origin(1).endswith("x.jsonl:5")
    assert shards.n_skipped_lines == 2
    assert "x.jsonl:2: no" in shards.first_skipped
    assert (
        stream.getvalue().splitlines()[-1].startswith("tokenise: 2 documents, 4 tokens, 2 bad lines skipped")
    )


def test_source_without_documents_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("{\n")
    with pytest.raises(ShardError, match=f"{tmp_path} holds no document, 1 bad lines skipped"):
        open_shards(open_source(str(tmp_path), bad_lines="skip"), tokenizer, tmp_path / "c")


@pytest.mark.parametrize("damage", ["cut", "gone", "meta"])
def test_damaged_shards_are_named(tokenizer: Tokenizer, tmp_path: Path, damage: str) -> None:
    root = open_shards(ListSource(), tokenizer, tmp_path).directory
    if damage == "cut":
        os.truncate(root / "tokens.bin", 8)
    elif damage == "gone":
        (root / "offsets.bin").unlink()
    else:
        (root / "meta.json").write_text("{}")
    with pytest.raises(ShardError, match=f"{root}: token shards are damaged"):
        read_shards(root)
