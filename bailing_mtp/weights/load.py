"""Streamed loading of a Hugging Face checkpoint into any tensor- and expert-parallel shard.

Each rank reads only its slices, one tensor at a time, in file order, and copies them in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.weights.check import TensorCheck, check_tensors
from bailing_mtp.weights.checkpoint_files import (
    TORCH_DTYPES,
    CheckpointError,
    CheckpointFiles,
    open_checkpoint,
    read_architecture,
    tensor_reader,
)
from bailing_mtp.weights.local_tensors import local_tensors, piece_view
from bailing_mtp.weights.names import ParamMaps, Piece, Shard, mtp_map, trunk_map

__all__ = ["CheckpointError", "LoadReport", "load_hf", "read_architecture"]


@dataclass(frozen=True)
class LoadReport:
    """What a load read, and what it left for an export to pass through."""

    n_tensors: int
    """HF tensors of which this rank read something."""
    read_bytes: int
    source_dtypes: Mapping[str, torch.dtype]
    """Stored dtype of every HF tensor, by HF name."""
    passed_through: tuple[str, ...]
    """The MTP layer's tensors, when the checkpoint holds them and no MTP layer was built."""
    mtp_loss_scaling_factor: float | None
    """What the checkpoint's config says; training does not use it."""


def load_hf(
    directory: Path,
    arch: Architecture,
    shard: Shard,
    trunk: nn.Module,
    mtp: nn.Module | None,
    skip_mtp: bool = False,
) -> LoadReport:
    """Fill every parameter and expert bias of `trunk` (and `mtp`) with this rank's part of a checkpoint, an HF
    directory or a sharded one.

    Values are cast once, from the stored dtype to the parameter's. Nothing is read when anything does not
    fit. Without `mtp`, the checkpoint's MTP layer may be absent or whole, and is not read; with `skip_mtp` it
    is not even looked at, since the caller starts a fresh one.
    Raises CheckpointError for missing, extra or unusable tensors, listing them; UserError when the sizes do
    not divide by the shard.
    """
    files = open_checkpoint(directory)
    targets = _targets(trunk, trunk_map(arch, shard))
    if mtp is not None:
        targets += _targets(mtp, mtp_map(arch, shard))
    check = check_tensors(files, arch)
    if skip_mtp:
        assert mtp is None, "an MTP layer cannot be both loaded and skipped"
        check.require_trunk(files)
    else:
        _require(files, arch, check, with_mtp=mtp is not None)
    read_bytes = _fill(files, targets)
    factor = files.config.get("mtp_loss_scaling_factor")
    return LoadReport(
        n_tensors=len({piece.hf_name for piece, _ in targets}),
        read_bytes=read_bytes,
        source_dtypes={name: TORCH_DTYPES[stored.dtype] for name, stored in files.tensors.items()},
        passed_through=check.mtp_present if mtp is None and not skip_mtp else (),
        mtp_loss_scaling_factor=float(factor) if isinstance(factor, int | float) else None,
    )


def _require(files: CheckpointFiles, arch: Architecture, check: TensorCheck, with_mtp: bool) -> None:
    check.require_trunk(files)
    if check.mtp_present and arch.num_mtp_layers == 0:
        raise CheckpointError(
            f"{files.directory}: holds {len(check.mtp_present)} tensors of an MTP layer "
            f"({check.mtp_present[0]}, ...), but num_nextn_predict_layers is 0; expected 1"
        )
    if with_mtp or check.mtp_present:
        check.require_mtp(files)


def _targets(module: nn.Module, maps: ParamMaps) -> list[tuple[Piece, Tensor]]:
    tensors = local_tensors(module, maps)
    return [
        (piece, piece_view(tensors[name], piece)) for name, param in maps.items() for piece in param.pieces
    ]


def _fill(files: CheckpointFiles, targets: list[tuple[Piece, Tensor]]) -> int:
    """Copy every piece to its place; returns the bytes read."""

    def place(target: tuple[Piece, Tensor]) -> tuple[str, int]:
        stored = files.tensors[target[0].hf_name]
        return str(stored.file), stored.begin_bytes

    read_bytes = 0
    with tensor_reader(files) as read, torch.no_grad():
        for piece, view in sorted(targets, key=place):
            part = read(piece.hf_name, piece.held)
            view.copy_(part.reshape(view.shape))
            read_bytes += part.numel() * part.element_size()
    return read_bytes
