"""Documents from `data.path`: generated problems, a text file, a JSONL file, or a directory of them.

A `.txt` file is one document, however long (packing cuts it); a `.jsonl` file has one document a line,
`{"text": ...}`. Blank JSONL lines are no documents and no errors. In a directory, hidden files are left out.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol
from urllib.parse import parse_qsl

from bailing_mtp.errors import UserError

BadLinePolicy = Literal["fail", "skip"]
Split = Literal["train", "valid"]
GENERATED_PREFIX = "reasoning_gym:"
TEXT_SUFFIXES = (".txt", ".jsonl")
# Items of one generated family are seeded by seed + item index, so whole splits lie this far apart.
_SPLIT_STRIDE = 2**30


class Document(NamedTuple):
    """One text and where it came from (`file.jsonl:12`, `reasoning_gym:gcd#3`)."""

    text: str
    origin: str


class BadDocument(UserError):
    """A line or file that holds no usable text; the message names file and line."""


class BadLines:
    """What to do with bad lines: raise at the first, or skip and count them.

    can_skip: whether the user could have chosen to skip them, and is told so.
    """

    def __init__(self, policy: BadLinePolicy = "fail", can_skip: bool = True) -> None:
        if policy not in ("fail", "skip"):
            raise UserError(f"data.bad_lines: {policy!r} is not supported; allowed: fail, skip")
        self.policy = policy
        self._hint = " (data.bad_lines=skip leaves such lines out)" if can_skip else ""
        self.n_skipped = 0
        self.first: str | None = None
        """The first skipped line's message."""

    def report(self, origin: str, reason: str) -> None:
        """Raise BadDocument, or count the line, by policy."""
        message = f"{origin}: {reason}"
        if self.policy == "fail":
            raise BadDocument(message + self._hint)
        self.n_skipped += 1
        self.first = self.first or message


class Source(Protocol):
    """Documents in a fixed order, and an identity that changes when they do."""

    @property
    def path(self) -> str: ...

    @property
    def policy(self) -> BadLinePolicy: ...

    def identity(self) -> str: ...

    def documents(self, bad_lines: BadLines) -> Iterator[Document]: ...


@dataclass(frozen=True)
class FileSource:
    """A `.txt` or `.jsonl` file, or a directory searched recursively in sorted order."""

    path: str
    policy: BadLinePolicy = "fail"

    def files(self) -> list[Path]:
        """The files read, in reading order. Raises FileNotFoundError or UserError naming data.path."""
        root = Path(self.path)
        if root.is_file():
            if root.suffix in TEXT_SUFFIXES:
                return [root]
            raise UserError(f"data.path: {self.path} is no text file; allowed: .txt, .jsonl, a directory")
        if not root.is_dir():
            raise FileNotFoundError(
                f"data.path: {self.path} does not exist; allowed: a .txt or .jsonl file, "
                f"a directory of them, or {GENERATED_PREFIX}<task>,..."
            )
        names = (file.relative_to(root) for file in root.rglob("*") if file.is_file())
        shown = [name for name in names if not any(part.startswith(".") for part in name.parts)]
        found = sorted(name.as_posix() for name in shown if name.suffix in TEXT_SUFFIXES)
        if not found:
            raise FileNotFoundError(f"data.path: {self.path} holds no .txt or .jsonl file")
        return [root / name for name in found]

    def identity(self) -> str:
        """Digest of names, sizes and modification times, and of the bad-line policy."""
        stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in self.files()]
        return _digest(["files", self.policy, stats])

    def documents(self, bad_lines: BadLines) -> Iterator[Document]:
        for file in self.files():
            yield from _jsonl(file, bad_lines) if file.suffix == ".jsonl" else _whole(file, bad_lines)


@dataclass(frozen=True)
class GeneratedSource:
    """Problems of reasoning-gym families with their answers, dealt in turn; no file is read.

    The same fields give the same documents; another split or seed gives others.
    """

    tasks: tuple[str, ...]
    n_documents: int
    seed: int = 0
    split: Split = "train"
    policy: BadLinePolicy = "fail"

    @property
    def path(self) -> str:
        return GENERATED_PREFIX + ",".join(self.tasks)

    def identity(self) -> str:
        """Digest of the fields and the generator's version."""
        version = importlib.metadata.version("reasoning_gym")
        return _digest(["reasoning_gym", version, self.tasks, self.n_documents, self.seed, self.split])

    def documents(self, bad_lines: BadLines) -> Iterator[Document]:
        for entry, origin in self.entries():
            yield Document(problem_text(entry["question"], str(entry["answer"])), origin)

    def entries(self) -> Iterator[tuple[dict[str, Any], str]]:
        """The generator's own entries (question, answer, metadata), each with its origin."""
        n_tasks = len(self.tasks)
        sizes = [(self.n_documents - rank + n_tasks - 1) // n_tasks for rank in range(n_tasks)]
        families = [_family(task, sizes[rank], self._task_seed(task)) for rank, task in enumerate(self.tasks)]
        for index in range(self.n_documents):
            item, rank = divmod(index, n_tasks)
            entry, task = families[rank][item], self.tasks[rank]
            if entry["answer"] is None:
                raise UserError(f"data.path: task {task!r} has no written answers to train on")
            yield entry, f"{GENERATED_PREFIX}{task}#{item}"

    def _task_seed(self, task: str) -> int:
        base = int(_digest([self.seed, task])[:16], 16) % _SPLIT_STRIDE
        return base if self.split == "train" else base + _SPLIT_STRIDE


def open_source(
    path: str,
    bad_lines: BadLinePolicy = "fail",
    n_documents: int = 20_000,
    seed: int = 0,
    split: Split = "train",
) -> Source:
    """The documents of `data.path`.

    `reasoning_gym:task,...` generates `n_documents` problems, seeded by `seed` and `split`; a query such as
    `?documents=5000&seed=7` in the path overrides the arguments. Anything else is a file or directory, to
    which `n_documents`, `seed` and `split` mean nothing. Only syntax and existence are checked here: a bad
    line or an unknown task is reported when the documents are read.
    Raises FileNotFoundError or UserError naming data.path.
    """
    BadLines(bad_lines)
    if path.startswith(GENERATED_PREFIX):
        return _parse_generated(path, bad_lines, n_documents, seed, split)
    source = FileSource(path, bad_lines)
    source.files()
    return source


def problem_prompt(question: str) -> str:
    """The part of a generated document before its answer."""
    return f"Question: {question.strip()}\nAnswer:"


def problem_text(question: str, answer: str) -> str:
    """A generated document: question and answer in one fixed form."""
    return f"{problem_prompt(question)} {answer.strip()}\n"


def _parse_generated(
    path: str, policy: BadLinePolicy, n_documents: int, seed: int, split: Split
) -> GeneratedSource:
    names, _, query = path.removeprefix(GENERATED_PREFIX).partition("?")
    tasks = tuple(name.strip() for name in names.split(","))
    if not all(tasks) or len(set(tasks)) != len(tasks):
        raise UserError(
            f"data.path: {path}; allowed: {GENERATED_PREFIX}<task>,<task>,... with each task once"
        )
    numbers = {"documents": n_documents, "seed": seed}
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key not in numbers or not value.isdecimal():
            raise UserError(f"data.path: {path}: {key}={value}; allowed: documents=<n>, seed=<n>")
        numbers[key] = int(value)
    if not len(tasks) <= numbers["documents"] < _SPLIT_STRIDE:
        raise UserError(f"data.path: {path}: {numbers['documents']} documents; allowed: one or more a task")
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError(f"data.path: {path} needs the package reasoning-gym: pip install reasoning-gym")
    return GeneratedSource(tasks, numbers["documents"], numbers["seed"], split, policy)


def _family(task: str, n_items: int, seed: int) -> Any:
    # Imported here: it takes more than a second, and reused shards never need it.
    factory = importlib.import_module("reasoning_gym.factory")
    if task not in factory.DATASETS:
        close = difflib.get_close_matches(task, factory.DATASETS, n=3)
        hint = (
            f"did you mean {', '.join(close)}?"
            if close
            else f"allowed: {', '.join(sorted(factory.DATASETS))}"
        )
        raise UserError(f"data.path: unknown reasoning_gym task {task!r}; {hint}")
    try:
        return factory.create_dataset(task, size=n_items, seed=seed)
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(f"data.path: reasoning_gym task {task!r} refuses its defaults: {error}") from error


def _whole(file: Path, bad_lines: BadLines) -> Iterator[Document]:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        bad_lines.report(str(file), f"not UTF-8 at byte {error.start}")
        return
    if text.strip():
        yield Document(text, str(file))
    else:
        bad_lines.report(str(file), "holds no text")


def _jsonl(file: Path, bad_lines: BadLines) -> Iterator[Document]:
    for record, origin in jsonl_records(file, bad_lines):
        text, reason = _record_text(record)
        if text is None:
            bad_lines.report(origin, reason)
        else:
            yield Document(text, origin)


def jsonl_records(file: Path, bad_lines: BadLines) -> Iterator[tuple[Any, str]]:
    """The JSON value of each line with its origin; blank lines are left out."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            origin = f"{file}:{number}"
            try:
                record = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                bad_lines.report(origin, f"not UTF-8 at byte {error.start}")
            except (ValueError, RecursionError) as error:
                bad_lines.report(origin, f"not valid JSON ({error})")
            else:
                yield record, origin


def _record_text(record: Any) -> tuple[str | None, str]:
    """The text of one line, or None and why there is none."""
    if not isinstance(record, dict) or "text" not in record:
        return None, 'no "text"; allowed: {"text": "..."}'
    text = record["text"]
    if not isinstance(text, str):
        return None, f'"text" is a {type(text).__name__}; allowed: a string'
    if not text.strip():
        return None, '"text" is empty'
    if not encodable(text):
        return None, '"text" holds half of a surrogate pair, which is no character'
    return text, ""


def encodable(text: str) -> bool:
    """Whether a text can be written as UTF-8 (half a surrogate pair cannot)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
