from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from bailing_mtp.data.sources import (
    BadDocument,
    BadLines,
    Document,
    FileSource,
    GeneratedSource,
    Source,
    open_source,
    problem_prompt,
    problem_text,
)


def _read(source: Source) -> list[tuple[str, str]]:
    return [tuple(document) for document in source.documents(BadLines(source.policy))]


def test_problem_form() -> None:
    assert problem_text("1 + 1 =\n", " 2") == "Question: 1 + 1 =\nAnswer: 2\n"
    assert problem_text("a", "b").startswith(problem_prompt("a"))


def test_generated_families_take_turns(corpus: GeneratedSource, corpus_documents: list[Document]) -> None:
    assert len(corpus_documents) == 300
    assert [document.origin for document in corpus_documents[:4]] == [
        "reasoning_gym:chain_sum#0",
        "reasoning_gym:gcd#0",
        "reasoning_gym:leg_counting#0",
        "reasoning_gym:chain_sum#1",
    ]
    sums = [document.text for document in corpus_documents if "chain_sum" in document.origin]
    for text in sums[:20]:
        problem, answer = re.fullmatch(r"Question: .*: ([-+\d ]+) =\nAnswer: (-?\d+)\n", text).groups()
        terms = re.findall(r"[-+]?\d+", problem.replace(" ", ""))
        assert sum(map(int, terms)) == int(answer)


def test_generated_documents_repeat_and_differ_by_seed_and_split(corpus: GeneratedSource) -> None:
    small = replace(corpus, n_documents=90)
    texts = {document for document, _ in _read(small)}
    assert _read(small) == _read(replace(small))
    for other in (replace(small, seed=4), replace(small, split="valid")):
        assert other.identity() != small.identity()
        assert len(texts & {document for document, _ in _read(other)}) < 10


def test_uneven_number_of_generated_documents(corpus: GeneratedSource) -> None:
    assert [origin[14:] for _, origin in _read(replace(corpus, n_documents=4))] == [
        "chain_sum#0",
        "gcd#0",
        "leg_counting#0",
        "chain_sum#1",
    ]


def test_query_overrides_arguments() -> None:
    source = open_source("reasoning_gym:gcd, chain_sum?documents=7&seed=5", n_documents=100, seed=1)
    assert source == GeneratedSource(("gcd", "chain_sum"), 7, 5)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("reasoning_gym:", "reasoning_gym:<task>"),
        ("reasoning_gym:gcd,,chain_sum", "each task once"),
        ("reasoning_gym:gcd,gcd", "each task once"),
        ("reasoning_gym:gcd?size=3", "size=3; allowed: documents=<n>, seed=<n>"),
        ("reasoning_gym:gcd?documents=-3", "documents=-3; allowed"),
        ("reasoning_gym:gcd?documents=0", "0 documents; allowed: one or more"),
    ],
)
def test_wrong_generated_path(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_source(path)


def test_unknown_task_names_close_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown reasoning_gym task 'chain_sun'; did you mean .*chain_sum"):
        _read(open_source("reasoning_gym:gcd,chain_sun"))


@pytest.mark.parametrize(
    ("task", "message"), [("composite", "refuses its defaults"), ("boxnet", "no written answers")]
)
def test_task_that_cannot_be_read_is_named(task: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"task '{task}'.*{message}"):
        _read(open_source(f"reasoning_gym:{task}", n_documents=1))


def test_text_file_is_one_document(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_text("one\n\ntwo\n")
    assert _read(open_source(str(file))) == [("one\n\ntwo\n", str(file))]


def test_directory_is_read_sorted_and_recursively(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "z.txt").write_text("z")
    (tmp_path / "b" / "a.jsonl").write_text('{"text": "b1"}\n\n{"text": "b3", "id": 3}')
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "notes.md").write_text("no data")
    (tmp_path / ".hidden" / "x.txt").write_text("no data")
    documents = _read(open_source(str(tmp_path)))
    assert [(text, origin.removeprefix(f"{tmp_path}/")) for text, origin in documents] == [
        ("a", "a.txt"),
        ("b1", "b/a.jsonl:1"),
        ("b3", "b/a.jsonl:3"),
        ("z", "z.txt"),
    ]


def test_missing_empty_and_foreign_paths(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"data.path: {tmp_path}/none does not exist"):
        open_source(f"{tmp_path}/none")
    with pytest.raises(FileNotFoundError, match=rf"data.path: {tmp_path} holds no"):
        open_source(str(tmp_path))
    (tmp_path / "x.csv").write_text("1")
    with pytest.raises(ValueError, match=r"data.path: .*x.csv is no text file; allowed: .txt"):
        open_source(f"{tmp_path}/x.csv")
    with pytest.raises(ValueError, match=r"data.bad_lines: 'ignore' is not supported; allowed: fail, skip"):
        open_source(str(tmp_path), bad_lines="ignore")


BAD_LINES = {
    b"{": "not valid JSON",
    b"[" * 100_000: "not valid JSON",
    b'{"text": "\xff"}': "not UTF-8 at byte 10",
    b'["text"]': 'no "text"',
    b'{"body": "x"}': 'no "text"',
    b'{"text": 3}': '"text" is a int',
    b'{"text": null}': '"text" is a NoneType',
    b'{"text": " "}': '"text" is empty',
    b'{"text": "a\\ud800"}': '"text" holds half of a surrogate pair',
}


@pytest.mark.parametrize(("line", "reason"), BAD_LINES.items(), ids=range(len(BAD_LINES)))
def test_bad_line_is_named_by_file_and_line(tmp_path: Path, line: bytes, reason: str) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(BadDocument, match=f"^{re.escape(str(file))}:2: {re.escape(reason)}"):
        _read(FileSource(str(file)))


def test_bad_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_bytes(b"\n".join([*BAD_LINES, json.dumps({"text": "good"}).encode()]))
    bad_lines = BadLines("skip")
    documents = list(FileSource(str(file), "skip").documents(bad_lines))
    assert documents == [Document("good", f"{file}:{len(BAD_LINES) + 1}")]
    assert bad_lines.n_skipped == len(BAD_LINES)
    assert bad_lines.first.startswith(f"{file}:1: not valid JSON")


def test_bad_text_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    (tmp_path / "b.txt").write_text(" \n")
    (tmp_path / "c.txt").write_text("c")
    with pytest.raises(BadDocument, match=r"a.txt: not UTF-8 at byte 2"):
        _read(FileSource(str(tmp_path)))
    assert [text for text, _ in _read(FileSource(str(tmp_path), "skip"))] == ["c"]
    with pytest.raises(BadDocument, match=r"b.txt: holds no text"):
        _read(FileSource(str(tmp_path / "b.txt")))


def test_identity_follows_the_files_and_the_policy(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one")
    first = FileSource(str(tmp_path)).identity()
    assert FileSource(str(tmp_path)).identity() == first
    assert FileSource(str(tmp_path), "skip").identity() != first
    os.utime(file, ns=(1, 1))
    touched = FileSource(str(tmp_path)).identity()
    file.write_text("four")
    os.utime(file, ns=(1, 1))
    assert len({first, touched, FileSource(str(tmp_path)).identity()}) == 3
