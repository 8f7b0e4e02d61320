"""Where a run's model comes from: random weights, a checkpoint of either kind, or the run's own last one."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bailing_mtp.config import ConfigError, RunConfig, check_mtp
from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.errors import UserError
from bailing_mtp.weights.check import check_tensors
from bailing_mtp.weights.checkpoint_files import CheckpointFiles, open_checkpoint
from bailing_mtp.weights.sharded.reader import ShardedCheckpoint
from bailing_mtp.weights.sharded.save import complete_checkpoints
from bailing_mtp.weights.stored import TORCH_DTYPES, CheckpointError

from .same_sizes import require_same_sizes

# What may differ when a run continues: it changes neither the weights that come out, beyond rounding, nor the data.
MAY_CHANGE = (
    "run_dir", "log", "parallel", "checkpoint", "train.log_every", "train.eval_every", "train.eval_steps",
    "train.eval_depth", "train.eval_samples", "train.recompute", "model.name", "model.kda", "model.experts",
    "model.attention", "model.kernels", "model.backend", "data.path", "data.valid_path",
    "optim.offload", "optim.fused", "rollout.max_running", "rollout.prefill_tokens", "rollout.block_tokens",
    "rollout.memory_gb", "rollout.keep_memory", "rollout.cuda_graphs", "rollout.kernels", "rollout.tp_sum",
    "rl.reward_workers", "rl.samples_kept",
)  # fmt: skip


@dataclass(frozen=True)
class Source:
    """Where the model comes from, known before any process group exists."""

    arch: Architecture
    directory: Path | None
    """Checkpoint of either kind, or None for random weights."""
    holds_mtp: bool
    router_dtype: torch.dtype | None
    """Stored dtype of the router weights, None for random weights."""
    files: CheckpointFiles | None = None
    fresh_mtp: tuple[str, ...] = ()
    """The MTP layer's tensors that the checkpoint lacks, where the layer starts at random."""
    resumes: bool = False
    """The directory is this run's own checkpoint: optimizer, schedule, data position and generators continue."""

    @property
    def sharded(self) -> ShardedCheckpoint | None:
        """The opened checkpoint, if it is one of this package's own."""
        return None if self.files is None else self.files.sharded


def find_source(config: RunConfig, resumes: bool = False) -> Source:
    """Read the architecture from the run's last checkpoint (`resumes`, and checkpoint.resume=auto), else from
    checkpoint.load, else from model.architecture. Raises UserError, also where the last two differ.
    """
    last = complete_checkpoints(Path(config.run_dir) / "checkpoints")[-1:] if resumes else []
    if last and config.checkpoint.resume == "auto":
        source = replace(_open(last[0]), resumes=True)
        saved = None if source.sharded is None else source.sharded.state.get("config")
        if saved is None:
            raise UserError(f"{last[0]}: holds weights alone; a run cannot continue from it, only checkpoint.load it")
        check_same_run(saved, config.model_dump(mode="json"), last[0])
        return source
    if config.checkpoint.load is None:
        arch = Architecture.from_hf(config.model.architecture or {}, "model.architecture", strict=True)
        return Source(arch, None, arch.num_mtp_layers > 0, None)
    directory = Path(config.checkpoint.load)
    if not directory.is_dir():
        raise UserError(
            f"checkpoint.load: {config.checkpoint.load!r} is not a directory; allowed: an HF checkpoint, or a "
            "sharded one (<run_dir>/checkpoints/step_<n>)"
        )
    source = _open(directory)
    if config.model.architecture is not None:
        require_same_sizes(config.model.architecture, source.arch, directory)
    return source


def require_mtp(source: Source, config: RunConfig, loss_scale: float | None) -> Source:
    """The source with its MTP layer settled for training. Raises UserError where training needs a layer that the
    checkpoint does not hold whole, unless checkpoint.allow_fresh_mtp says that it starts at random.
    """
    if loss_scale is None or source.files is None:
        check_mtp(mtp_layers=int(source.holds_mtp), checkpoint=config.checkpoint.load, loss_scale=loss_scale)
        return source
    allowed = config.checkpoint.allow_fresh_mtp
    check = check_tensors(source.files, source.arch)
    if check.mtp_complete:
        return source
    if not allowed and (source.arch.num_mtp_layers or check.mtp_present):
        try:
            check.require_mtp(source.files)
        except CheckpointError as error:
            hint = "\ncheckpoint.allow_fresh_mtp=true starts the whole MTP layer from random weights"
            raise CheckpointError(str(error) + hint) from None
    check_mtp(mtp_layers=0, checkpoint=str(source.directory), loss_scale=loss_scale, allow_fresh=allowed)
    arch = replace(source.arch, num_mtp_layers=1)
    return replace(source, arch=arch, holds_mtp=True, fresh_mtp=check.mtp_missing)


def check_same_run(saved: Mapping[str, Any], now: Mapping[str, Any], directory: Path) -> None:
    """Refuse to continue a run under a config that would make it another run. Raises ConfigError naming the keys."""
    problems = [
        f"{key}: was {before!r} when {directory} was written, now {after!r}"
        for key, before, after in _changes(saved, now)
        if not _harmless(key, now)
    ]
    if problems:
        raise ConfigError(
            *problems,
            "a run that continues keeps these keys; name another run_dir to start a new run (with "
            f"checkpoint.load={directory} from these weights)",
        )


def _harmless(key: str, now: Mapping[str, Any]) -> bool:
    optim = now.get("optim", {})
    # The learning rate of a step then does not depend on the number of steps.
    open_ended = optim.get("schedule") == "constant" or (
        optim.get("schedule") == "cosine" and optim.get("decay_steps") is not None
    )
    if key == "train.steps":
        return open_ended
    return any(key == allowed or key.startswith(allowed + ".") for allowed in MAY_CHANGE)


def _changes(old: Any, new: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = dict.fromkeys([*old, *new])
        return [c for k in keys for c in _changes(old.get(k), new.get(k), f"{path}.{k}" if path else k)]
    return [] if old == new else [(path, old, new)]


def _open(directory: Path) -> Source:
    files = open_checkpoint(directory)
    arch = Architecture.from_hf(files.config, str(directory / "config.json"))
    routers = [TORCH_DTYPES[t.dtype] for name, t in files.tensors.items() if name.endswith(".mlp.gate.weight")]
    holds_mtp = bool(check_tensors(files, arch).mtp_present)
    return Source(arch, directory, holds_mtp, routers[0] if routers else None, files)
