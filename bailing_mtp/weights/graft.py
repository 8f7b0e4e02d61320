"""A copy of a checkpoint with the MTP layer of its base.

An MTP layer reads the trunk's embedding and hidden states and writes through its head, so it fits only the
trunk that it was trained on, or a fine-tuned one. What is compared: the architecture, the tokenizers' digests,
and embedding and head by |a - b| / |b|. Fine-tuning moves these matrices by a few percent at most; independent
models differ by about 1.4.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import torch

from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.weights.check import check_tensors
from bailing_mtp.weights.checkpoint_files import CheckpointFiles, tensor_reader
from bailing_mtp.weights.convert import write_hf
from bailing_mtp.weights.export import MAX_SHARD_BYTES, require_new
from bailing_mtp.weights.names import Slice, mtp_hf_shapes, trunk_hf_shapes
from bailing_mtp.weights.shard_writer import PlannedTensor
from bailing_mtp.weights.stored import CONFIG_NAME, TORCH_DTYPES, CheckpointError

COMPARED = ("model.word_embeddings.weight", "lm_head.weight")
ROWS_AT_ONCE = 4096


def graft(
    files: CheckpointFiles,
    base: CheckpointFiles,
    target: Path,
    tokenizer_digest: str | None,
    base_tokenizer_digest: str | None,
    max_difference: float,
) -> list[str]:
    """Write `target` (new, an HF directory): the trunk of `files`, the MTP layer of `base`.

    Digests are None where a checkpoint carries no tokenizer; both must carry one, or neither. Returns lines
    that say what was compared and written. Raises CheckpointError, before anything is written, naming what
    does not agree.
    """
    require_new(target)
    arch = _agreed_architecture(files, base)
    check_tensors(files, arch).require_trunk(files)
    check_tensors(base, arch).require_mtp(base)
    if tokenizer_digest != base_tokenizer_digest:
        raise CheckpointError(
            f"{base.directory}: its tokenizer (sha256 {_digest_name(base_tokenizer_digest)}) is not that of "
            f"{files.directory} ({_digest_name(tokenizer_digest)}); the MTP layer reads other ids"
        )
    lines = [f"tokenizer: {_digest_name(tokenizer_digest)} in both"]
    for name in COMPARED:
        if name in files.tensors and name in base.tensors:
            difference = relative_difference(files, base, name)
            lines.append(f"{name}: relative difference {difference:.2e}, allowed {max_difference:g}")
            if not difference <= max_difference:
                raise CheckpointError(
                    f"{base.directory}: {name} differs from that of {files.directory} by {difference:.2e} "
                    f"(|a - b| / |b|), allowed: max_embedding_difference={max_difference:g}; it is not its base"
                )
    sides = dict.fromkeys(trunk_hf_shapes(arch), files) | dict.fromkeys(mtp_hf_shapes(arch), base)
    plan = tuple(
        PlannedTensor(name, side.tensors[name].shape, TORCH_DTYPES[side.tensors[name].dtype])
        for name, side in sides.items()
    )
    report = write_hf(target, arch, plan, sides, files, MAX_SHARD_BYTES)
    lines.append(f"{target}: {report.n_tensors} tensors, {report.written_bytes / 1e6:,.1f} MB, with the MTP layer")
    return lines


def relative_difference(files: CheckpointFiles, base: CheckpointFiles, name: str) -> float:
    """|a - b| / |b| of one matrix (Frobenius norms, in fp64 over fp32 values), a few rows at a time."""
    n_rows = files.tensors[name].shape[0]
    squares = torch.zeros(2, dtype=torch.float64)
    with tensor_reader(files) as read, tensor_reader(base) as read_base:
        for start in range(0, n_rows, ROWS_AT_ONCE):
            part = Slice(0, start, min(n_rows, start + ROWS_AT_ONCE))
            ours, theirs = read(name, part).double(), read_base(name, part).double()
            squares += torch.stack([(ours - theirs).square().sum(), theirs.square().sum()])
    return float((squares[0] / squares[1]).sqrt())


def _digest_name(digest: str | None) -> str:
    return "none" if digest is None else digest[:12]


def _agreed_architecture(files: CheckpointFiles, base: CheckpointFiles) -> Architecture:
    ours, theirs = (
        replace(Architecture.from_hf(side.config, str(side.directory / CONFIG_NAME)), num_mtp_layers=1)
        for side in (files, base)
    )
    if ours != theirs:
        different = [
            f"{f.name}: {getattr(ours, f.name)!r} and {getattr(theirs, f.name)!r}"
            for f in fields(ours)
            if f.compare and getattr(ours, f.name) != getattr(theirs, f.name)
        ]
        raise CheckpointError(f"{files.directory} and {base.directory} are different models: " + "; ".join(different))
    return ours
