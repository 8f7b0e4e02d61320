"""Export to a Hugging Face directory: one tensor at a time to the writer, then renamed into place.

The config written says how many MTP layers the files hold: the one that was built, or the source's own.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.weights.checkpoint_files import (
    CONFIG_NAME,
    TORCH_DTYPES,
    CheckpointError,
    CheckpointFiles,
    open_checkpoint,
    tensor_reader,
)
from bailing_mtp.weights.gather import Gatherer
from bailing_mtp.weights.local_tensors import local_tensors
from bailing_mtp.weights.names import ParamMaps, Shard, mtp_map, trunk_map
from bailing_mtp.weights.passed import passed_through
from bailing_mtp.weights.shard_writer import PlannedTensor, ShardWriter

MAX_SHARD_BYTES = 5_000_000_000
COPIED = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*",
    "generation_config.json", "*.tiktoken", "*.py",
)  # fmt: skip


@dataclass(frozen=True)
class ExportReport:
    """What the writer wrote."""

    files: tuple[str, ...]
    n_tensors: int
    written_bytes: int
    num_mtp_layers: int
    passed_through: tuple[str, ...]
    """The source's MTP layer tensors, copied untouched."""


@dataclass(frozen=True)
class _Part:
    """One module: the table of the whole model, this rank's table, this rank's tensors."""

    whole: ParamMaps
    local: ParamMaps
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class _Plan:
    tensors: tuple[PlannedTensor, ...]
    source: CheckpointFiles | None
    passed_through: tuple[str, ...]
    config: dict[str, Any]


def export_hf(
    directory: Path,
    arch: Architecture,
    shard: Shard,
    trunk: nn.Module,
    mtp: nn.Module | None,
    *,
    tp_group: dist.ProcessGroup | None = None,
    ep_group: dist.ProcessGroup | None = None,
    is_writer: bool = True,
    source: Path | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> ExportReport | None:
    """Write `directory` (new, or existing and empty) as an HF checkpoint. Every rank calls it.

    The writer is global rank 0; it returns the report, the others None, perhaps before the files are there.
    `source`: HF directory whose tokenizer files, and MTP layer when `mtp` is None, are copied.
    `dtypes`: stored dtype by HF name, by default those of `source`, else the parameter's own; A_log, dt_bias
    and the expert bias are always stored in fp32.
    Raises CheckpointError on all ranks that take part, before anything is written: target not empty, source
    unusable.
    """
    parts = [_part(trunk, trunk_map(arch, Shard()), trunk_map(arch, shard))]
    if mtp is not None:
        parts.append(_part(mtp, mtp_map(arch, Shard()), mtp_map(arch, shard)))
    gatherer = Gatherer(shard, tp_group, ep_group, is_writer)
    stream = chain.from_iterable(gatherer.stream(part.whole, part.local, part.tensors) for part in parts)
    plan, refusal = None, None
    if is_writer:
        try:
            plan = _prepare(directory, arch, parts, mtp is not None, source, dtypes)
        except (CheckpointError, OSError) as error:
            refusal = error
    device = next(trunk.parameters()).device
    if not gatherer.agree(refusal is None, device):
        raise refusal or CheckpointError(
            f"{directory}: global rank 0 refused the export; its message says why"
        )
    if plan is None:
        for _ in stream:
            pass
        return None
    return _write(directory, plan, stream, max_shard_bytes)


def _part(module: nn.Module, whole: ParamMaps, local: ParamMaps) -> _Part:
    return _Part(whole, local, local_tensors(module, local))


def _prepare(
    directory: Path,
    arch: Architecture,
    parts: list[_Part],
    has_mtp: bool,
    source: Path | None,
    dtypes: Mapping[str, torch.dtype] | None,
) -> _Plan:
    """Everything that can be refused, decided before anything is written."""
    require_new(directory)
    files = open_checkpoint(source) if source is not None else None
    if dtypes is None:
        dtypes = _stored_dtypes(files)
    tensors = [planned for part in parts for planned in _planned(part, dtypes)]
    passed = passed_through(files, arch) if files is not None and not has_mtp else ()
    tensors += [PlannedTensor(t.name, t.shape, t.dtype) for t in passed]
    config = hf_config(arch, int(has_mtp or bool(passed)), tensors[0].dtype)
    return _Plan(tuple(tensors), files, tuple(t.name for t in passed), config)


def _stored_dtypes(files: CheckpointFiles | None) -> dict[str, torch.dtype]:
    if files is None:
        return {}
    return {name: TORCH_DTYPES[t.dtype] for name, t in files.tensors.items() if t.dtype in TORCH_DTYPES}


def _planned(part: _Part, dtypes: Mapping[str, torch.dtype]) -> Iterator[PlannedTensor]:
    for name, param in part.whole.items():
        for piece in param.pieces:
            own = part.tensors[name].dtype
            dtype = own if param.keep_fp32 else dtypes.get(piece.hf_name, own)
            yield PlannedTensor(piece.hf_name, piece.hf_shape, dtype)


def hf_config(arch: Architecture, num_mtp_layers: int, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of an export: the architecture's own, with the MTP layers and dtype of the files."""
    assert arch.hf_config, "an architecture that was read from a config is needed to write one"
    config = dict(arch.hf_config) | {"num_nextn_predict_layers": num_mtp_layers}
    dtype_keys = [key for key in ("torch_dtype", "dtype") if key in config] or ["torch_dtype"]
    return config | {key: str(dtype).removeprefix("torch.") for key in dtype_keys}


def _write(
    directory: Path, plan: _Plan, stream: Iterator[tuple[str, Tensor | None]], max_shard_bytes: int
) -> ExportReport:
    with renamed_into(directory) as temporary:
        with ShardWriter(temporary, plan.tensors, max_shard_bytes) as writer:
            for name, tensor in stream:
                assert tensor is not None
                writer.write(name, tensor)
            if plan.source is not None and plan.passed_through:
                with tensor_reader(plan.source) as read:
                    for name in plan.passed_through:
                        writer.write(name, read(name))
            files = writer.finish()
        (temporary / CONFIG_NAME).write_text(json.dumps(plan.config, indent=2) + "\n", encoding="utf-8")
        if plan.source is not None:
            copy_small_files(plan.source.directory, temporary)
    return ExportReport(
        files=files,
        n_tensors=len(plan.tensors),
        written_bytes=sum(tensor.n_bytes for tensor in plan.tensors),
        num_mtp_layers=plan.config["num_nextn_predict_layers"],
        passed_through=plan.passed_through,
    )


def require_new(directory: Path) -> None:
    """Refuse to write over anything; make the directories above. Raises CheckpointError."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(f"{directory}: exists and is not an empty directory; name a new one")
    directory.parent.mkdir(parents=True, exist_ok=True)


def copy_small_files(source: Path, target: Path) -> None:
    """Tokenizer and generation files, and the modeling code that the config may name."""
    for path in {path for pattern in COPIED for path in source.glob(pattern) if path.is_file()}:
        shutil.copyfile(path, target / path.name)


@contextmanager
def renamed_into(directory: Path) -> Iterator[Path]:
    """A new directory beside the target, renamed when all went well and removed otherwise."""
    temporary = directory.with_name(f".{directory.name}.{uuid.uuid4().hex[:8]}.partial")
    temporary.mkdir()
    try:
        yield temporary
        temporary.rename(directory)
    finally:
        if temporary.exists():
            shutil.rmtree(temporary)
