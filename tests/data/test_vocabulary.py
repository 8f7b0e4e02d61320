from __future__ import annotations

from pathlib import Path

import pytest

from bailing_mtp.data.cache import CacheError
from bailing_mtp.data.sources import FileSource, GeneratedSource
from bailing_mtp.data.tokenizer import Tokenizer
from bailing_mtp.data.vocabulary import open_trained_tokenizer


def test_trained_on_the_documents_and_reused(
    corpus: GeneratedSource, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_trained_tokenizer(corpus, 512, tmp_path)
    assert (first.digest, first.eos_ids, first.pad_id) == (tokenizer.digest, (0,), 1)
    smaller = open_trained_tokenizer(corpus, 300, tmp_path)
    assert smaller.size == 300
    monkeypatch.setattr(GeneratedSource, "documents", None)
    again = open_trained_tokenizer(corpus, 512, tmp_path, is_builder=False)
    assert again.digest == first.digest


def test_failure_leaves_nothing_and_releases_the_others(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("{\n")
    source, calls = FileSource(str(tmp_path), "skip"), []
    with pytest.raises(ValueError, match=f"data.path: {tmp_path} holds no document"):
        open_trained_tokenizer(source, 300, tmp_path / "c", barrier=lambda: calls.append(0))
    with pytest.raises(CacheError, match="not there"):
        open_trained_tokenizer(source, 300, tmp_path / "c", is_builder=False)
    assert calls == [0]
    assert list((tmp_path / "c").iterdir()) == []
