"""Reference log-probabilities of dpo: computed before the first step, kept on disk for runs that continue."""

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from bailing_mtp.config import DpoConfig
from bailing_mtp.contracts.batch import TokenBatch
from bailing_mtp.data.dialogues import documents_of
from bailing_mtp.data.packing import best_fit, make_batch
from bailing_mtp.data.shards import TokenShards
from bailing_mtp.errors import UserError
from bailing_mtp.log import ProgressLine, duration
from bailing_mtp.model.build import BuiltModel
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.training.preference import reference_logprobs
from bailing_mtp.weights.fingerprint import weights_fingerprint

from .failure import fail_together
from .session import Source

TENSOR = "reference_logprobs"


class Reference(NamedTuple):
    """`logprobs_N`: fp64, of the trained tokens of each document, summed. `key`: of data and weights."""

    key: str
    logprobs_N: np.ndarray


def open_reference(
    config: DpoConfig, source: Source, shards: TokenShards, built: BuiltModel, context: ParallelContext
) -> Reference:
    """Read them, or compute them with the weights of `built`, which must then be those of the run's start.

    Collective. Raises UserError on all ranks where a run that continues finds them no more.
    """
    key = _key(config, source, shards)
    directory = Path(config.dpo.reference_dir or Path(config.run_dir) / "data")
    file = directory / f"reference-{key}.safetensors"
    found, error = None, None
    if context.is_writer:
        try:
            found = _read(file, shards) if file.is_file() else None
        except UserError as caught:
            error = caught
        if found is None and source.resumes and error is None:
            error = UserError(
                f"{file}: the reference log-probabilities of the run's start are gone, and its weights have moved on; "
                "put the file back, or start a new run"
            )
    fail_together(error)
    box = [found]
    if context.world_size > 1:
        dist.broadcast_object_list(box, src=0)
    if box[0] is not None:
        return Reference(key, box[0])
    logprobs_N = _compute(config, shards, built, context)
    if context.is_writer:
        _write(file, logprobs_N)
    return Reference(key, logprobs_N)


def _key(config: DpoConfig, source: Source, shards: TokenShards) -> str:
    """A run that continues keeps the key of its start, which its data position holds."""
    if source.resumes:
        assert source.sharded is not None
        return str(source.sharded.state["data"].get("reference"))
    if source.directory is None:
        weights = json.dumps(["random", config.seed, dict(source.arch.hf_config)], sort_keys=True)
    else:
        weights = weights_fingerprint(source.directory)
    parts = json.dumps([shards.content_digest, weights, config.model.dtype])
    return hashlib.sha256(parts.encode()).hexdigest()[:24]


def _compute(config: DpoConfig, shards: TokenShards, built: BuiltModel, context: ParallelContext) -> np.ndarray:
    lengths = np.diff(shards.offsets).tolist()
    packs = best_fit(lengths, config.train.microbatch_tokens)
    line, started_s = ProgressLine(sys.stderr if context.is_writer else None), time.monotonic()

    def pack(documents: list[int]) -> TokenBatch:
        return make_batch(documents_of(shards, documents), config.train.microbatch_tokens, config.data.seq_tokens)

    def show(done: int) -> None:
        line.show(f"reference: {done}/{len(packs)} packs", final=done == len(packs))

    logprobs_N = reference_logprobs(built, packs, pack, context, show).numpy()
    if context.is_writer:
        took = duration(time.monotonic() - started_s)
        print(f"reference: log-probabilities of {len(lengths):,} rows by the initial weights, {took}", flush=True)
    return logprobs_N


def _read(file: Path, shards: TokenShards) -> np.ndarray:
    try:
        values_N = load_file(file)[TENSOR]
    except (SafetensorError, KeyError) as error:
        raise UserError(f"{file}: is damaged ({error}); delete it and it is computed again") from error
    if values_N.shape != (shards.n_documents,) or values_N.dtype != np.float64:
        raise UserError(f"{file}: holds {values_N.dtype} {list(values_N.shape)} for {shards.n_documents} rows")
    return values_N


def _write(file: Path, logprobs_N: np.ndarray) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".partial")
    save_file({TENSOR: logprobs_N}, partial)
    partial.rename(file)
