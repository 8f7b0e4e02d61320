"""The MTP layer of a run that does not train it: its tensors travel with every checkpoint, byte for byte."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.weights.check import check_tensors
from bailing_mtp.weights.checkpoint_files import SINGLE_NAME, CheckpointFiles, tensor_reader
from bailing_mtp.weights.names import mtp_hf_shapes
from bailing_mtp.weights.shard_writer import PlannedTensor, ShardWriter
from bailing_mtp.weights.sharded.reader import PASSED_NAME
from bailing_mtp.weights.stored import TORCH_DTYPES


def passed_through(files: CheckpointFiles, arch: Architecture) -> tuple[PlannedTensor, ...]:
    """The source's MTP layer; half a layer is refused, since the config must say 0 or 1."""
    check = check_tensors(files, arch)
    if not check.mtp_present:
        return ()
    check.require_mtp(files)
    shapes = mtp_hf_shapes(replace(arch, num_mtp_layers=1))
    return tuple(PlannedTensor(name, shape, TORCH_DTYPES[files.tensors[name].dtype]) for name, shape in shapes.items())


def write_passed_through(files: CheckpointFiles, arch: Architecture, directory: Path) -> None:
    """Put the source's MTP layer into a sharded checkpoint; nothing is written if it has none."""
    target = directory / PASSED_NAME
    known = files.directory / PASSED_NAME
    if known.exists():
        _link_or_copy(known, target)
        return
    plan = passed_through(files, arch)
    if not plan:
        return
    with ShardWriter(directory, plan, sum(t.n_bytes for t in plan)) as writer, tensor_reader(files) as read:
        for tensor in plan:
            writer.write(tensor.name, read(tensor.name))
        writer.finish()
    (directory / SINGLE_NAME).rename(target)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        # Another file system, or one without links.
        shutil.copyfile(source, target)
