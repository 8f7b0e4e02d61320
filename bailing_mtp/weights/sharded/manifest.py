"""What makes a sharded checkpoint complete and whole: manifest.json names every file, its size and its sha256.

It is written last under the temporary name, so a directory with the final name always has one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from bailing_mtp.weights.sharded.chunks import FileDigest, digest_of
from bailing_mtp.weights.stored import CheckpointError, read_json, write_durably

MANIFEST_NAME = "manifest.json"
FORMAT = "bailing_mtp sharded checkpoint"
VERSION = 1


def is_sharded(directory: Path) -> bool:
    """Whether a directory is, or was meant to be, a sharded checkpoint of this package."""
    return any((directory / name).is_file() for name in (MANIFEST_NAME, "index.json", ".metadata"))


def write_manifest(directory: Path, files: Mapping[str, FileDigest]) -> None:
    """Write the manifest; `files` are digests already known, every other file is read for its own."""
    names = sorted(path.name for path in directory.iterdir())
    digests = {name: files[name] if name in files else digest_of(directory / name) for name in names}
    entries = {name: {"bytes": n_bytes, "sha256": sha256} for name, (n_bytes, sha256) in digests.items()}
    text = json.dumps({"format": FORMAT, "version": VERSION, "files": entries}, indent=1)
    write_durably(directory / MANIFEST_NAME, text + "\n")


def read_manifest(directory: Path) -> dict[str, FileDigest]:
    """File name -> size and digest. Raises CheckpointError."""
    source = directory / MANIFEST_NAME
    manifest = read_json(source)
    found = (manifest.get("format"), manifest.get("version"))
    if found != (FORMAT, VERSION):
        raise CheckpointError(f"{source}: format and version {found}; this version reads {(FORMAT, VERSION)}")
    files = manifest.get("files")
    try:
        return {str(name): FileDigest(int(e["bytes"]), str(e["sha256"])) for name, e in files.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{source}: files: expected name -> bytes and sha256") from error


def check_files(directory: Path) -> None:
    """Every file is there under its name and in its size, and no other. Raises CheckpointError naming them."""
    files = read_manifest(directory)
    sizes = {path.name: path.stat().st_size for path in directory.iterdir() if path.name != MANIFEST_NAME}
    problems = [f"{name}: is missing" for name in files if name not in sizes]
    problems += [f"{name}: is not in {MANIFEST_NAME}" for name in sizes if name not in files]
    problems += [
        f"{name}: {sizes[name]} bytes, {MANIFEST_NAME} says {digest.n_bytes}"
        for name, digest in files.items()
        if name in sizes and sizes[name] != digest.n_bytes
    ]
    _refuse(directory, problems)


def verify(directory: Path, rank: int = 0, world_size: int = 1) -> None:
    """Digest this rank's share of the files. Raises CheckpointError naming those whose bytes changed."""
    files = sorted(read_manifest(directory).items(), key=lambda item: -item[1].n_bytes)
    mine = files[rank::world_size]
    changed = [name for name, digest in mine if digest_of(directory / name) != digest]
    _refuse(directory, [f"{name}: its bytes changed since it was written (sha256 differs)" for name in changed])


def _refuse(directory: Path, problems: list[str]) -> None:
    if problems:
        raise CheckpointError(
            f"{directory}: is damaged\n" + "\n".join(problems) + "\nuse another checkpoint, or a good copy of it"
        )
