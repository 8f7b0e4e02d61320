"""Memory-mapped token shards: documents are tokenised once, and later runs reuse the files.

A shard directory holds `tokens.bin` (uint32, all documents one after another, each ended by the
end-of-text id), `offsets.bin` (int64 [N+1], tokens), `origins.bin` (UTF-8) with `origin_offsets.bin`
(int64 [N+1], bytes), and `meta.json`. N is the number of documents. Where not every token is trained there is
also `loss_mask.bin` (uint8, 1 on trained tokens), and documents end as their maker ended them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from bailing_mtp.data.cache import CacheError, build_once
from bailing_mtp.data.packing import TokenDocument
from bailing_mtp.data.sources import BadLinePolicy, BadLines, Document, Source
from bailing_mtp.data.tokenizer import Tokenizer
from bailing_mtp.log import ProgressLine

FORMAT_VERSION = 1
MASK_NAME = "loss_mask.bin"
_BATCH_DOCUMENTS = 1024
_BATCH_CHARS = 4_000_000


class Origin(Protocol):
    """What shards are made from: its path for messages, and an identity that changes with what it holds."""

    @property
    def path(self) -> str: ...

    @property
    def policy(self) -> BadLinePolicy: ...

    def identity(self) -> str: ...


class ShardError(CacheError):
    """Shards that are missing, damaged, or cannot be built; the message names the directory or source."""


@dataclass(frozen=True)
class TokenShards:
    """Tokenised documents, read only."""

    directory: Path
    content_digest: str
    """sha256 of the tokens and document borders: the same for the same documents wherever they lie."""
    tokens: np.ndarray
    """uint32, all documents."""
    offsets: np.ndarray
    """int64 [N+1], in tokens."""
    origins: np.ndarray
    """uint8, the UTF-8 of all origins."""
    origin_offsets: np.ndarray
    """int64 [N+1], in bytes."""
    max_token_id: int
    n_skipped_lines: int
    first_skipped: str | None
    loss_mask: np.ndarray | None = None
    """uint8, 1 on trained tokens; None: all are."""
    notes: Mapping[str, int] = field(default_factory=dict)
    """What the maker of the documents counted while it made them."""

    @property
    def n_documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def n_tokens(self) -> int:
        return int(self.offsets[-1])

    def document(self, index: int, begin: int = 0, n_tokens: int | None = None) -> np.ndarray:
        """uint32 tokens of a document, or of `n_tokens` of it from `begin` on."""
        return self.tokens[self._span(index, begin, n_tokens)]

    def mask(self, index: int, begin: int = 0, n_tokens: int | None = None) -> np.ndarray | None:
        """Loss mask of the same tokens as `document`, None where all are trained."""
        return None if self.loss_mask is None else self.loss_mask[self._span(index, begin, n_tokens)]

    def _span(self, index: int, begin: int, n_tokens: int | None) -> slice:
        first, last = int(self.offsets[index]), int(self.offsets[index + 1])
        return slice(first + begin, last if n_tokens is None else min(first + begin + n_tokens, last))

    def origin(self, index: int) -> str:
        """Where a document came from."""
        first, last = int(self.origin_offsets[index]), int(self.origin_offsets[index + 1])
        return bytes(self.origins[first:last]).decode("utf-8")


def open_shards(
    source: Source,
    tokenizer: Tokenizer,
    cache_dir: str | Path,
    *,
    is_builder: bool = True,
    barrier: Callable[[], None] = lambda: None,
    progress: ProgressLine | None = None,
) -> TokenShards:
    """The shards of `source`, built first if `cache_dir` does not hold them.

    Ranks work together as in `build_once`: one has `is_builder`, the others wait in `barrier`.
    Raises CacheError, or what reading the source raises.
    """
    directory = Path(cache_dir) / f"tokens-{shards_key(source, tokenizer)[:20]}"

    def fill(work_dir: Path) -> None:
        tokenised = functools.partial(_tokenised, source, tokenizer)
        _write_shards(source, tokenised, {}, work_dir, progress or ProgressLine(None), masked=False)

    return read_shards(build_once(directory, fill, is_builder=is_builder, barrier=barrier))


def open_masked_shards(
    source: Origin,
    key: str,
    make: Callable[[BadLines, Counter[str]], Iterator[TokenDocument]],
    cache_dir: str | Path,
    *,
    is_builder: bool = True,
    barrier: Callable[[], None] = lambda: None,
    progress: ProgressLine | None = None,
) -> TokenShards:
    """Shards of documents that `make` tokenises and masks itself; it may count what it does in the counter.

    `key`: digest of everything that the documents depend on. Ranks and errors as in `open_shards`.
    """
    directory = Path(cache_dir) / f"masked-{key[:20]}"

    def fill(work_dir: Path) -> None:
        notes: Counter[str] = Counter()
        documents = functools.partial(make, notes=notes)
        _write_shards(source, documents, notes, work_dir, progress or ProgressLine(None), masked=True)

    return read_shards(build_once(directory, fill, is_builder=is_builder, barrier=barrier))


def shards_key(source: Source, tokenizer: Tokenizer) -> str:
    """Digest of everything that the shards depend on."""
    parts = [FORMAT_VERSION, source.identity(), tokenizer.digest, tokenizer.eos_id]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def read_shards(directory: str | Path) -> TokenShards:
    """Open complete shards. Raises ShardError for a directory whose files do not have the recorded sizes."""
    root = Path(directory)
    try:
        meta = json.loads((root / "meta.json").read_text(encoding="utf-8"))
        sizes = {name: (root / name).stat().st_size for name in meta["file_bytes"]}
    except (OSError, ValueError, KeyError) as error:
        raise ShardError(f"{root}: token shards are damaged ({error}); delete the directory") from error
    if sizes != meta["file_bytes"]:
        raise ShardError(
            f"{root}: token shards are damaged (bytes: {sizes}, recorded: {meta['file_bytes']}); "
            "delete the directory and they are built again"
        )
    return TokenShards(
        directory=root,
        content_digest=meta["content_digest"],
        tokens=_mapped(root / "tokens.bin", np.uint32),
        offsets=_mapped(root / "offsets.bin", np.int64),
        origins=_mapped(root / "origins.bin", np.uint8),
        origin_offsets=_mapped(root / "origin_offsets.bin", np.int64),
        max_token_id=meta["max_token_id"],
        n_skipped_lines=meta["n_skipped_lines"],
        first_skipped=meta["first_skipped"],
        loss_mask=_mapped(root / MASK_NAME, np.uint8) if MASK_NAME in sizes else None,
        notes=meta.get("notes", {}),
    )


class _Writer:
    """Appends tokenised documents to the files of an unfinished shard directory."""

    def __init__(self, root: Path, files: contextlib.ExitStack, masked: bool) -> None:
        self._root = root
        self._mask: BinaryIO | None = files.enter_context((root / MASK_NAME).open("wb")) if masked else None
        self._tokens: BinaryIO = files.enter_context((root / "tokens.bin").open("wb"))
        self._origins: BinaryIO = files.enter_context((root / "origins.bin").open("wb"))
        self._content = hashlib.sha256()
        self._lengths: list[int] = []
        self._origin_lengths: list[int] = []
        self.n_tokens = 0
        self.max_token_id = 0

    @property
    def n_documents(self) -> int:
        return len(self._lengths)

    def add(self, document: TokenDocument) -> None:
        tokens = np.asarray(document.token_ids, dtype=np.uint32)
        self._write(self._tokens, tokens)
        if self._mask is not None:
            assert document.loss_mask is not None, document.origin
            self._write(self._mask, np.asarray(document.loss_mask, dtype=np.uint8))
        origin_bytes = document.origin.encode("utf-8", "replace")
        self._origins.write(origin_bytes)
        self._lengths.append(len(tokens))
        self._origin_lengths.append(len(origin_bytes))
        self.n_tokens += len(tokens)
        self.max_token_id = max(self.max_token_id, int(tokens.max()))

    def _write(self, file: BinaryIO, values: np.ndarray) -> None:
        file.write(values.tobytes())
        self._content.update(values.tobytes())

    def finish(self, bad_lines: BadLines, notes: Mapping[str, int]) -> None:
        """Write the borders and, last, the record of what belongs here."""
        for file in (self._tokens, self._origins, self._mask):
            if file is not None:
                file.flush()
        offsets = np.fromiter(accumulate(self._lengths, initial=0), dtype=np.int64)
        origin_offsets = np.fromiter(accumulate(self._origin_lengths, initial=0), dtype=np.int64)
        (self._root / "offsets.bin").write_bytes(offsets.tobytes())
        (self._root / "origin_offsets.bin").write_bytes(origin_offsets.tobytes())
        self._content.update(offsets.tobytes())
        names = ["tokens.bin", "offsets.bin", "origins.bin", "origin_offsets.bin"]
        names += [] if self._mask is None else [MASK_NAME]
        meta = {
            "format_version": FORMAT_VERSION,
            "content_digest": self._content.hexdigest(),
            "file_bytes": {name: (self._root / name).stat().st_size for name in names},
            "max_token_id": self.max_token_id,
            "n_skipped_lines": bad_lines.n_skipped,
            "first_skipped": bad_lines.first,
            "notes": dict(notes),
        }
        (self._root / "meta.json").write_text(json.dumps(meta, indent=2), encoding="utf-8")


def _write_shards(
    source: Origin,
    documents: Callable[[BadLines], Iterator[TokenDocument]],
    notes: Mapping[str, int],
    work_dir: Path,
    progress: ProgressLine,
    masked: bool,
) -> None:
    identity, bad_lines, begin_s = source.identity(), BadLines(source.policy), time.monotonic()
    with contextlib.ExitStack() as files:
        writer = _Writer(work_dir, files, masked)
        for document in documents(bad_lines):
            writer.add(document)
            if writer.n_documents % _BATCH_DOCUMENTS == 0:
                rate = writer.n_tokens / max(time.monotonic() - begin_s, 1e-9)
                progress.show(f"{_counts(writer)}, {rate:.3g} tokens/s")
        left_out = [f"{bad_lines.n_skipped} bad lines skipped, first {bad_lines.first}"] if bad_lines.n_skipped else []
        said = ", ".join(["", *left_out, *(f"{n} {what}" for what, n in notes.items())])
        if writer.n_documents == 0:
            raise ShardError(f"data.path: {source.path} holds no document{said}")
        writer.finish(bad_lines, notes)
    progress.show(_counts(writer) + said, final=True)
    if source.identity() != identity:
        raise ShardError(f"{source.path}: changed while it was read; start again when it is complete")


def _tokenised(source: Source, tokenizer: Tokenizer, bad_lines: BadLines) -> Iterator[TokenDocument]:
    for batch in _batches(source.documents(bad_lines)):
        ids_of_documents = tokenizer.encode_batch([document.text for document in batch])
        for document, ids in zip(batch, ids_of_documents, strict=True):
            yield TokenDocument([*ids, tokenizer.eos_id], document.origin)


def _counts(writer: _Writer) -> str:
    return f"tokenise: {writer.n_documents} documents, {writer.n_tokens} tokens"


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    n_chars = 0
    for document in documents:
        batch.append(document)
        n_chars += len(document.text)
        if len(batch) == _BATCH_DOCUMENTS or n_chars >= _BATCH_CHARS:
            yield batch
            batch, n_chars = [], 0
    if batch:
        yield batch


def _mapped(file: Path, dtype: type[np.generic]) -> np.ndarray:
    if file.stat().st_size == 0:
        return np.zeros(0, dtype=dtype)
    return np.memmap(file, dtype=dtype, mode="r")
