"""Directories that are made once and then reused by every rank and every later run.

A directory is filled under a temporary name and renamed when complete, so a killed build is never read, and
of two builders of the same directory one wins and the other uses its result.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bailing_mtp.errors import UserError

_PREFIX = ".building-"
_STALE_S = 24 * 3600.0


class CacheError(UserError):
    """A cached directory that is missing or cannot be used; the message names it."""


def build_once(
    directory: Path,
    fill: Callable[[Path], None],
    *,
    is_builder: bool = True,
    barrier: Callable[[], None] = lambda: None,
) -> Path:
    """`directory`, after `fill` wrote its files if it was not there.

    Every rank calls this; one has `is_builder` and the others wait in `barrier`, which all call once, also
    when `fill` fails (then every rank raises). The directory must be visible to all of them.
    Raises CacheError on the waiting ranks, and on the builder what `fill` raises.
    """
    try:
        if is_builder and not directory.exists():
            _build(directory, fill)
    finally:
        barrier()
    if not directory.exists():
        raise CacheError(
            f"{directory}: not there after the building rank finished: it failed, or its disk is not shared"
        )
    return directory


def _build(directory: Path, fill: Callable[[Path], None]) -> None:
    parent = directory.parent
    parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(parent)
    work_dir = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{directory.name}-", dir=parent))
    try:
        fill(work_dir)
        # mkdtemp makes directories for the owner alone; the cache may be shared by a group.
        work_dir.chmod(parent.stat().st_mode & 0o777)
        _publish(work_dir, directory)
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)


def _publish(work_dir: Path, directory: Path) -> None:
    try:
        work_dir.rename(directory)
    except OSError:
        # Another process finished the same directory first: a rename never replaces a filled one.
        if not directory.exists():
            raise


def _remove_stale(parent: Path) -> None:
    """Delete what killed builds left; a living build has written within a day."""
    for left in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):
            written_s = max(entry.stat().st_mtime for entry in (left, *left.iterdir()))
            if time.time() - written_s > _STALE_S:
                shutil.rmtree(left, ignore_errors=True)
