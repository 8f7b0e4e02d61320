"""Memory-mapped token shards: documents are tokenised once, and later runs reuse the files.

A shard directory holds `tokens.bin` (uint32, all documents one after another, each ended by the
end-of-text id), `offsets.bin` (int64 [N+1], tokens), `origins.bin` (UTF-8) with `origin_offsets.bin`
(int64 [N+1], bytes), and `meta.json`. N is the number of documents.

It is written under a temporary name and renamed when complete, so a killed build is never read, and of
two builders of the same shards one wins and the other uses its result.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import numpy as np

from bailing_mtp.data.sources import BadLines, Document, Source
from bailing_mtp.data.tokenizer import Tokenizer
from bailing_mtp.log import ProgressLine

FORMAT_VERSION = 1
_BATCH_DOCUMENTS = 1024
_BATCH_CHARS = 4_000_000
_STALE_S = 24 * 3600.0


class ShardError(ValueError):
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

    @property
    def n_documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def n_tokens(self) -> int:
        return int(self.offsets[-1])

    def document(self, index: int, begin: int = 0, n_tokens: int | None = None) -> np.ndarray:
        """uint32 tokens of a document, or of `n_tokens` of it from `begin` on."""
        first, last = int(self.offsets[index]), int(self.offsets[index + 1])
        end = last if n_tokens is None else min(first + begin + n_tokens, last)
        return self.tokens[first + begin : end]

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

    Every rank calls this; one has `is_builder` and the others wait in `barrier`, which is called once by
    all, also when the build fails (then every rank raises). `cache_dir` must be visible to all of them.
    Raises ShardError, or what reading the source raises.
    """
    directory = Path(cache_dir) / f"tokens-{shards_key(source, tokenizer)[:20]}"
    try:
        if is_builder and not directory.exists():
            _build(source, tokenizer, directory, progress or ProgressLine(None))
    finally:
        barrier()
    if not directory.exists():
        raise ShardError(
            f"{directory}: not there after the building rank finished: it failed, or its disk is not shared"
        )
    return read_shards(directory)


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
    )


class _Writer:
    """Appends tokenised documents to the files of an unfinished shard directory."""

    def __init__(self, root: Path, files: contextlib.ExitStack) -> None:
        self._root = root
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

    def add(self, ids: list[int], origin: str) -> None:
        tokens = np.asarray(ids, dtype=np.uint32)
        self._tokens.write(tokens.tobytes())
        self._content.update(tokens.tobytes())
        origin_bytes = origin.encode("utf-8", "replace")
        self._origins.write(origin_bytes)
        self._lengths.append(len(ids))
        self._origin_lengths.append(len(origin_bytes))
        self.n_tokens += len(ids)
        self.max_token_id = max(self.max_token_id, int(tokens.max()))

    def finish(self, bad_lines: BadLines) -> None:
        """Write the borders and, last, the record of what belongs here."""
        self._tokens.flush()
        self._origins.flush()
        offsets = np.fromiter(accumulate(self._lengths, initial=0), dtype=np.int64)
        origin_offsets = np.fromiter(accumulate(self._origin_lengths, initial=0), dtype=np.int64)
        (self._root / "offsets.bin").write_bytes(offsets.tobytes())
        (self._root / "origin_offsets.bin").write_bytes(origin_offsets.tobytes())
        self._content.update(offsets.tobytes())
        names = ("tokens.bin", "offsets.bin", "origins.bin", "origin_offsets.bin")
        meta = {
            "format_version": FORMAT_VERSION,
            "content_digest": self._content.hexdigest(),
            "file_bytes": {name: (self._root / name).stat().st_size for name in names},
            "max_token_id": self.max_token_id,
            "n_skipped_lines": bad_lines.n_skipped,
            "first_skipped": bad_lines.first,
        }
        (self._root / "meta.json").write_text(json.dumps(meta, indent=2), encoding="utf-8")


def _build(source: Source, tokenizer: Tokenizer, directory: Path, progress: ProgressLine) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(directory.parent)
    identity = source.identity()
    work_dir = Path(tempfile.mkdtemp(prefix=f".building-{directory.name}-", dir=directory.parent))
    try:
        with contextlib.ExitStack() as files:
            _tokenise(source, tokenizer, _Writer(work_dir, files), progress)
        if source.identity() != identity:
            raise ShardError(f"{source.path}: changed while it was read; start again when it is complete")
        # mkdtemp makes directories for the owner alone; the cache may be shared by a group.
        work_dir.chmod(directory.parent.stat().st_mode & 0o777)
        _publish(work_dir, directory)
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)


def _tokenise(source: Source, tokenizer: Tokenizer, writer: _Writer, progress: ProgressLine) -> None:
    bad_lines, begin_s = BadLines(source.policy), time.monotonic()
    for batch in _batches(source.documents(bad_lines)):
        ids_of_documents = tokenizer.encode_batch([document.text for document in batch])
        for document, ids in zip(batch, ids_of_documents, strict=True):
            writer.add([*ids, tokenizer.eos_id], document.origin)
        rate = writer.n_tokens / max(time.monotonic() - begin_s, 1e-9)
        progress.show(f"{_counts(writer)}, {rate:.3g} tokens/s")
    skipped = (
        f", {bad_lines.n_skipped} bad lines skipped, first {bad_lines.first}" if bad_lines.n_skipped else ""
    )
    if writer.n_documents == 0:
        raise ShardError(f"data.path: {source.path} holds no document{skipped}")
    writer.finish(bad_lines)
    progress.show(_counts(writer) + skipped, final=True)


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


def _publish(work_dir: Path, directory: Path) -> None:
    try:
        work_dir.rename(directory)
    except OSError:
        # Another process finished the same shards first: a rename never replaces a filled directory.
        if not directory.exists():
            raise


def _remove_stale(cache_dir: Path) -> None:
    """Delete what killed builds left; a living build has written within a day."""
    for left in cache_dir.glob(".building-tokens-*"):
        with contextlib.suppress(FileNotFoundError):
            written_s = max(entry.stat().st_mtime for entry in (left, *left.iterdir()))
            if time.time() - written_s > _STALE_S:
                shutil.rmtree(left, ignore_errors=True)


def _mapped(file: Path, dtype: type[np.generic]) -> np.ndarray:
    if file.stat().st_size == 0:
        return np.zeros(0, dtype=dtype)
    return np.memmap(file, dtype=dtype, mode="r")
