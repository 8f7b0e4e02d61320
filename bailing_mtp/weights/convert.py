"""Between Hugging Face directories and sharded checkpoints, one tensor in memory at a time.

Tensors keep their bytes, unless a sharded checkpoint knows the dtypes of the HF checkpoint that it once came
from: an export gives those back. The MTP layer goes along whether the run trained it or passed it through.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.weights.check import check_tensors
from bailing_mtp.weights.checkpoint_files import CheckpointFiles, tensor_reader
from bailing_mtp.weights.export import ExportReport, copy_small_files, hf_config, renamed_into, require_new
from bailing_mtp.weights.names import ParamMaps, Shard, mtp_map, trunk_map
from bailing_mtp.weights.shard_writer import PlannedTensor, ShardWriter
from bailing_mtp.weights.sharded.chunks import Chunk, ChunkWriter, FileDigest, write_index
from bailing_mtp.weights.sharded.manifest import write_manifest
from bailing_mtp.weights.sharded.reader import STATE_NAME
from bailing_mtp.weights.sharded.sections import hf_blocks, stored_shapes
from bailing_mtp.weights.stored import CONFIG_NAME, TORCH_DTYPES, CheckpointError


def whole_maps(files: CheckpointFiles) -> tuple[Architecture, ParamMaps]:
    """The architecture, and the table of everything the checkpoint holds: the trunk, and the MTP layer if it has
    one. Raises CheckpointError unless every tensor is accounted for.
    """
    arch = Architecture.from_hf(files.config, str(files.directory / CONFIG_NAME))
    check = check_tensors(files, arch)
    check.require_trunk(files)
    maps = trunk_map(arch, Shard())
    if check.mtp_present:
        check.require_mtp(files)
        arch = replace(arch, num_mtp_layers=1)
        maps = maps | {f"mtp.{name}": param for name, param in mtp_map(arch, Shard()).items()}
    return arch, maps


def to_hf(files: CheckpointFiles, target: Path, max_shard_bytes: int) -> ExportReport:
    """Write `target` (new) as an HF directory. Raises CheckpointError before anything is written."""
    require_new(target)
    arch, maps = whole_maps(files)
    plan = tuple(_planned(files, maps))
    return write_hf(target, arch, plan, {tensor.name: files for tensor in plan}, files, max_shard_bytes)


def write_hf(
    target: Path,
    arch: Architecture,
    plan: tuple[PlannedTensor, ...],
    sources: Mapping[str, CheckpointFiles],
    small_files_of: CheckpointFiles,
    max_shard_bytes: int,
) -> ExportReport:
    """Write planned tensors, each read from its own source; the config says 1 MTP layer iff one is among them."""
    n_mtp = int(any(tensor.name.startswith(f"model.layers.{arch.num_layers}.") for tensor in plan))
    with renamed_into(target) as partial:
        with ShardWriter(partial, plan, max_shard_bytes) as writer:
            for tensor in plan:
                with tensor_reader(sources[tensor.name]) as read:
                    writer.write(tensor.name, read(tensor.name))
            names = writer.finish()
        config = hf_config(arch, n_mtp, plan[0].dtype)
        (partial / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        copy_small_files(small_files_of.directory, partial)
    return ExportReport(names, len(plan), sum(tensor.n_bytes for tensor in plan), n_mtp, ())


def to_sharded(files: CheckpointFiles, target: Path, max_file_bytes: int) -> ExportReport:
    """Write `target` (new) as a sharded checkpoint of weights, without optimizer and data position, for
    checkpoint.load. Raises CheckpointError before anything is written.
    """
    require_new(target)
    arch, maps = whole_maps(files)
    names = [piece.hf_name for param in maps.values() for piece in param.pieces]
    n_mtp = int(any(name.startswith(f"model.layers.{arch.num_layers}.") for name in names))
    with renamed_into(target) as partial:
        chunks, digests = _write_chunks(files, maps, names, partial, max_file_bytes)
        state = {"step": 0, "hf_dtypes": stored_dtypes(files)}
        config = {**arch.hf_config, "num_nextn_predict_layers": n_mtp}
        for name, value in ((CONFIG_NAME, config), (STATE_NAME, state)):
            (partial / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        copy_small_files(files.directory, partial)
        write_index(partial, chunks)
        write_manifest(partial, digests)
    n_bytes = sum(digest.n_bytes for digest in digests.values())
    return ExportReport(tuple(digests), len(names), n_bytes, n_mtp, ())


def stored_dtypes(files: CheckpointFiles) -> dict[str, Any]:
    """Dtypes that an export should give back: the most common one, and the tensors that have another."""
    if files.sharded is not None:
        return dict(files.sharded.state.get("hf_dtypes", {}))
    dtypes = {name: tensor.dtype for name, tensor in files.tensors.items()}
    common = Counter(dtypes.values()).most_common(1)[0][0]
    return {"common": common, "others": {name: dtype for name, dtype in dtypes.items() if dtype != common}}


def _planned(files: CheckpointFiles, maps: ParamMaps) -> Iterator[PlannedTensor]:
    wanted = stored_dtypes(files) if files.sharded is not None else {}
    for param in maps.values():
        for piece in param.pieces:
            name = piece.hf_name
            stored = files.tensors[name].dtype
            is_free = not param.keep_fp32 and wanted
            dtype = wanted["others"].get(name, wanted["common"]) if is_free else stored
            yield PlannedTensor(name, piece.hf_shape, TORCH_DTYPES[dtype])


def _write_chunks(
    files: CheckpointFiles, maps: ParamMaps, names: Iterable[str], directory: Path, max_file_bytes: int
) -> tuple[list[Chunk], dict[str, FileDigest]]:
    blocks, shapes = hf_blocks(maps), stored_shapes(maps)
    dtypes: dict[str, torch.dtype] = {}
    chunks: list[Chunk] = []
    digests: dict[str, FileDigest] = {}
    with tensor_reader(files) as read:
        for group in _grouped(files, names, max_file_bytes):
            file = directory / f"__0_{len(digests)}.distcp"
            with ChunkWriter(file) as writer:
                for name in group:
                    key, block = blocks[name]
                    tensor = read(name)
                    if dtypes.setdefault(key, tensor.dtype) is not tensor.dtype:
                        raise CheckpointError(
                            f"{files.directory}: {name} is {tensor.dtype}, but other experts of its layer are "
                            f"{dtypes[key]}; a layer's experts must have one dtype"
                        )
                    is_vector = len(shapes[key]) == 1
                    size = (block.rows,) if is_vector else (block.rows, block.cols)
                    offset = (block.row,) if is_vector else (block.row, block.col)
                    writer.put(key, shapes[key], offset, tensor.reshape(size))
                digests[file.name] = writer.finish()
            chunks += writer.chunks
    return chunks, digests


def _grouped(files: CheckpointFiles, names: Iterable[str], max_bytes: int) -> Iterator[list[str]]:
    """Names in groups of at most `max_bytes`, or of one larger tensor."""
    group: list[str] = []
    used = 0
    for name in chain(names, [""]):
        size = files.tensors[name].n_bytes if name else max_bytes + 1
        if group and used + size > max_bytes:
            yield group
            group, used = [], 0
        group.append(name)
        used += size
