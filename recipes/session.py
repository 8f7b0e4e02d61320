"""From a config to ranks, architecture and a filled model: what every recipe with a model begins with."""

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from bailing_mtp.config import LayoutSizes, RolloutConfig, RunConfig, check_layout, check_optimizer
from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.log import duration
from bailing_mtp.model.build import BuiltModel, build_model, count_parameters
from bailing_mtp.parallel.context import ParallelContext, build_context
from bailing_mtp.weights.fresh import init_fresh
from bailing_mtp.weights.load import load_hf
from bailing_mtp.weights.names import Shard
from bailing_mtp.weights.sharded.manifest import verify
from bailing_mtp.weights.stored import CheckpointError

from .failure import fail_together
from .kernel_settings import prepare_kernels
from .model_settings import DTYPES, fp8_note, model_settings
from .ranks import Ranks
from .sources import Source, find_source, require_mtp

__all__ = [
    "DTYPES",
    "Source",
    "find_source",
    "join_ranks",
    "leave_ranks",
    "make_model",
    "model_settings",
    "require_mtp",
    "rollout_notes",
]


def join_ranks(config: RunConfig, arch: Architecture) -> ParallelContext:
    """Check the layout, then form the process groups on the GPU if there is one, else on the CPU."""
    ranks = Ranks.from_environment()
    sizes = LayoutSizes(
        num_attention_heads=arch.num_heads,
        vocab_size=arch.vocab_size,
        intermediate_size=arch.intermediate_size,
        moe_intermediate_size=arch.moe_intermediate_size if arch.num_experts else None,
        shared_intermediate_size=arch.shared_intermediate_size,
        num_experts=arch.num_experts,
    )
    layout = {"tp": config.parallel.tp, "ep": config.parallel.ep, "world_size": ranks.world_size}
    check_layout(sizes, **layout)
    if "optim" in type(config).model_fields:
        check_optimizer(name=config.optim.name, has_experts=bool(arch.num_experts), **layout)
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    context = build_context(config.parallel.tp, config.parallel.ep, config.seed, device_type, local_rank)
    prepare_kernels(config, context)
    return context


def rollout_notes(rollout: RolloutConfig, context: ParallelContext) -> Callable[[str], None]:
    """Where the rollout engine says what it waits for: printed by rank 0. Warns of kernels that a GPU is slow with."""
    if context.is_writer and context.device.type == "cuda" and rollout.kernels == "torch":
        print("rollout.kernels=torch on a GPU: plain torch, for checks; slow", flush=True)

    def tell(text: str) -> None:
        if context.is_writer:
            print(text, flush=True)

    return tell


def leave_ranks() -> None:
    """End the process group, so that the launcher sees a clean exit."""
    if dist.is_initialized():
        dist.destroy_process_group()


def make_model(
    config: RunConfig,
    source: Source,
    context: ParallelContext,
    with_mtp: bool,
    recompute: str = "none",
    expert_bias_rate: float = 0.0,
    fused_weight_gradients: bool = False,
) -> BuiltModel:
    """Build this rank's shards and fill them from the checkpoint, or at random from the seed; says what it did."""
    started_s = time.monotonic()
    settings = model_settings(config.model, source, recompute, expert_bias_rate, fused_weight_gradients)
    built = build_model(source.arch, settings, context, with_mtp)
    shard = Shard(context.tp, context.tp_rank, context.ep, context.ep_rank)
    if source.directory is None:
        init_fresh(source.arch, shard, built.trunk, built.mtp, config.seed)
        origin = f"random from seed {config.seed}"
    else:
        _verify(source, context)
        stored_mtp = None if source.fresh_mtp else built.mtp
        skip_mtp = bool(source.fresh_mtp)
        report = load_hf(source.directory, source.arch, shard, built.trunk, stored_mtp, skip_mtp)
        if source.fresh_mtp:
            init_fresh(source.arch, shard, None, built.mtp, config.seed)
        origin = f"{report.n_tensors} tensors, {report.read_bytes / 2**20:.0f} MiB from {source.directory}"
        if context.is_writer and report.mtp_loss_scaling_factor:
            print(
                f"  ignored: mtp_loss_scaling_factor={report.mtp_loss_scaling_factor} of the checkpoint's config; "
                "mtp.loss_scale decides"
            )
    if context.is_writer:
        mtp = "with" if with_mtp else "without"
        print(
            f"model: {count_parameters(*built.modules):,} parameters on this rank, {mtp} the MTP layer "
            f"({origin}), {duration(time.monotonic() - started_s)}",
            flush=True,
        )
        if settings.fp8 is not None:
            print(fp8_note(settings, built), flush=True)
    return built


def _verify(source: Source, context: ParallelContext) -> None:
    """Digest a sharded checkpoint's files, each rank a share. Collective."""
    if source.sharded is None:
        return
    error = None
    try:
        verify(source.sharded.directory, context.rank, context.world_size)
    except CheckpointError as caught:
        error = caught
    fail_together(error)
