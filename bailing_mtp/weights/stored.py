"""What every kind of checkpoint on disk shares: its error, dtypes, the place of a tensor, JSON files."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bailing_mtp.errors import UserError
from bailing_mtp.weights.names import Shape

CONFIG_NAME = "config.json"
TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class CheckpointError(UserError):
    """A checkpoint that cannot be used; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies; of a tensor in several parts, where the first part lies."""

    file: Path
    dtype: str
    """As a safetensors file spells it: BF16, F32, ..."""
    shape: Shape
    begin_bytes: int
    """From the start of the file."""
    n_bytes: int
    """Of the whole tensor."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError."""
    if not path.is_file():
        raise CheckpointError(f"{path}: does not exist")
    return parse_object(path.read_bytes(), str(path))


def parse_object(text: bytes, source: str) -> dict[str, Any]:
    """The JSON object in `text`, which came from `source`. Raises CheckpointError."""
    try:
        value = json.loads(text.decode("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{source}: is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{source}: expected a JSON object, not {type(value).__name__}")
    return value


def write_durably(path: Path, text: str) -> None:
    """Write a small file so that its name never shows half of it, even after a crash."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make renames inside a directory survive a crash of the machine."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
