"""Writes sharded checkpoints while training goes on.

A save copies this rank's tensors to host memory (the only time that training waits for), then a thread writes
them under a temporary name. Ranks agree at the next step boundaries: when all have written, the first rank
writes the index and the manifest and renames the directory; when one has failed, all end with its message.
Only then is `latest` changed, and only then are older checkpoints deleted. So whatever is killed, and whenever,
every directory named step_<n> is complete.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bailing_mtp.errors import UserError
from bailing_mtp.parallel.context import ParallelContext, gather_texts
from bailing_mtp.weights.names import Shape
from bailing_mtp.weights.sharded.chunks import Chunk, ChunkWriter, FileDigest, write_index
from bailing_mtp.weights.sharded.manifest import MANIFEST_NAME, write_manifest
from bailing_mtp.weights.stored import sync_directory, write_durably

LATEST_NAME = "latest"


class Stored(NamedTuple):
    """A block to store: `tensor` is this rank's live memory, copied before training goes on."""

    key: str
    shape: Shape
    offset: Shape
    tensor: Tensor


@dataclass(frozen=True)
class SaveReport:
    """A finished save."""

    step: int
    directory: Path
    n_bytes: int
    """Of all ranks' tensors."""
    stall_s: float
    """Time that training waited on this rank."""
    total_s: float


@dataclass
class _Pending:
    step: int
    directory: Path
    written: Future[tuple[list[Chunk], FileDigest]]
    started_s: float
    stall_s: float


class CheckpointSaver:
    """Saves to <root>/step_<n>, one save at a time. All ranks make the same calls."""

    def __init__(self, root: Path, context: ParallelContext, keep: int) -> None:
        self._root, self._context, self._keep = root, context, keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: _Pending | None = None

    def start(self, step: int, stored: Iterable[Stored], extras: Callable[[Path], None]) -> None:
        """Copy `stored` and begin to write it. `extras(directory)` writes further files, on the first rank only.

        No save may be pending.
        """
        assert self._pending is None, "a save is pending"
        started_s = time.monotonic()
        partial = self._root / f".step_{step}.partial"
        if self._context.is_writer:
            self._root.mkdir(parents=True, exist_ok=True)
            for stale in self._root.glob(".step_*"):
                shutil.rmtree(stale)
            partial.mkdir()
        copies = [item._replace(tensor=_host_copy(item.tensor)) for item in stored]
        self._context.barrier()
        written = self._thread.submit(self._write, partial, copies, extras)
        del copies
        self._pending = _Pending(step, partial, written, started_s, time.monotonic() - started_s)

    def poll(self, block: bool = False) -> SaveReport | None:
        """Finish the pending save if every rank has written its part; `block` waits for that.

        Collective while a save is pending. Raises UserError on all ranks if any could not write; the
        checkpoints that were there before are untouched.
        """
        pending = self._pending
        if pending is None:
            return None
        started_s = time.monotonic()
        if block:
            wait([pending.written])
        if not self._all_done(pending.written.done()):
            pending.stall_s += time.monotonic() - started_s
            return None
        self._pending = None
        chunks, digests = self._gather(pending)
        directory = self._commit(pending, chunks, digests)
        now_s = time.monotonic()
        n_bytes = sum(digest.n_bytes for digest in digests.values())
        stall_s = pending.stall_s + now_s - started_s
        return SaveReport(pending.step, directory, n_bytes, stall_s, now_s - pending.started_s)

    def _write(
        self, partial: Path, stored: list[Stored], extras: Callable[[Path], None]
    ) -> tuple[list[Chunk], FileDigest]:
        with ChunkWriter(partial / self._file(self._context.rank)) as writer:
            for item in stored:
                writer.put(*item)
            digest = writer.finish()
        if self._context.is_writer:
            extras(partial)
        return writer.chunks, digest

    @staticmethod
    def _file(rank: int) -> str:
        return f"__{rank}_0.distcp"

    def _all_done(self, done: bool) -> bool:
        flag = torch.tensor([int(done)], device=self._context.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag.item())

    def _gather(self, pending: _Pending) -> tuple[list[Chunk], dict[str, FileDigest]]:
        """All ranks' chunks and digests; raises on all ranks if one failed."""
        error = pending.written.exception()
        if error is not None and not isinstance(error, OSError | UserError):
            raise error
        self._agree(pending.directory, error)
        everyone: list[Any] = [None] * self._context.world_size
        dist.all_gather_object(everyone, pending.written.result())
        chunks = [chunk for rank_chunks, _ in everyone for chunk in rank_chunks]
        return chunks, {self._file(rank): digest for rank, (_, digest) in enumerate(everyone)}

    def _commit(self, pending: _Pending, chunks: list[Chunk], digests: dict[str, FileDigest]) -> Path:
        target = self._root / f"step_{pending.step}"
        error: OSError | None = None
        if self._context.is_writer:
            try:
                write_index(pending.directory, chunks)
                write_manifest(pending.directory, digests)
                self._publish(pending.directory, target)
            except OSError as caught:
                error = caught
        self._agree(pending.directory, error)
        return target

    def _publish(self, partial: Path, target: Path) -> None:
        if target.exists():
            target.rename(self._root / f".{target.name}.replaced")
        partial.rename(target)
        sync_directory(self._root)
        write_durably(self._root / LATEST_NAME, target.name + "\n")
        for old in complete_checkpoints(self._root)[: -self._keep]:
            old.rename(self._root / f".{old.name}.deleted")
        for leftover in self._root.glob(".step_*"):
            shutil.rmtree(leftover)

    def _agree(self, partial: Path, error: BaseException | None) -> None:
        """Raise the same UserError on every rank if any brings an error."""
        text = "" if error is None else f"rank {self._context.rank}: {_reason(error, partial)}"
        texts = [text for text in gather_texts(self._context, text) if text]
        if not texts:
            return
        if self._context.is_writer:
            shutil.rmtree(partial, ignore_errors=True)
        kept = complete_checkpoints(self._root)
        before = f"{kept[-1]} is untouched" if kept else "there is no earlier one"
        name = partial.name.removeprefix(".").removesuffix(".partial")
        raise UserError(f"{self._root / name}: could not be written; {before}\n" + "\n".join(texts))


def complete_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints under a run's checkpoints/, oldest first."""
    found = [path for path in root.glob("step_*") if (path / MANIFEST_NAME).is_file()]
    return sorted((path for path in found if path.name[5:].isdecimal()), key=lambda path: int(path.name[5:]))


def _host_copy(tensor: Tensor) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    return copy.copy_(tensor.detach())


def _reason(error: BaseException, partial: Path) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or partial}: {error.strerror}"
    return str(error)
