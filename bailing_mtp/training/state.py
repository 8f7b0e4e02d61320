"""Everything a training run owns: modules under DDP, the distributed optimizer, the schedule, the step count."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from bailing_mtp.config import OptimConfig
from bailing_mtp.contracts.clock import WeightsClock
from bailing_mtp.model.build import BuiltModel
from bailing_mtp.model.mtp import MtpLayer
from bailing_mtp.model.trunk import BailingModel
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.parallel.fused import choose_fused
from bailing_mtp.training.adamw8bit import build_adamw8bit
from bailing_mtp.training.main_grads import watch_first_gradients
from bailing_mtp.training.offload import OptimizerOffload


@dataclass(frozen=True)
class DdpOptions:
    """Gradient buckets. bucket_elements: None lets megatron-core choose."""

    overlap_grad_reduce: bool = True
    bucket_elements: int | None = None


@dataclass
class TrainState:
    """A run's moving parts. `step` counts finished optimizer steps."""

    context: ParallelContext
    trunk: DistributedDataParallel
    mtp: DistributedDataParallel | None
    optimizer: ChainedOptimizer
    scheduler: OptimizerParamScheduler
    clip_norm: float | None
    """Largest gradient norm, of the trunk and of the MTP layer each; None: no clipping."""
    clock: WeightsClock = field(default_factory=WeightsClock)
    """Advances with every optimizer step, so that a stale view of the weights is noticed."""
    step: int = 0
    frozen_mtp: MtpLayer | None = None
    """An MTP layer that only drafts: no gradient, no DDP, no optimizer."""
    offload: OptimizerOffload | None = None
    """Keeps optimizer states in host memory between steps; None: they stay on the device."""

    @property
    def chunks(self) -> list[DistributedDataParallel]:
        """The DDP chunks, trunk first."""
        return [self.trunk] if self.mtp is None else [self.trunk, self.mtp]

    @property
    def trunk_module(self) -> BailingModel:
        return self.trunk.module

    @property
    def mtp_module(self) -> MtpLayer | None:
        """The MTP layer, trained or frozen."""
        return self.frozen_mtp if self.mtp is None else self.mtp.module


def build_state(
    built: BuiltModel,
    context: ParallelContext,
    optim: OptimConfig,
    steps: int,
    ddp: DdpOptions = DdpOptions(),
    trains_mtp: bool = True,
) -> TrainState:
    """Wrap filled modules for training. The MTP layer is a DDP chunk of its own, so the trunk's buckets and
    gradient norm are the same with and without it. trains_mtp: False freezes it (weight decay, too, would move it).
    """
    frozen = None if trains_mtp else built.mtp
    if frozen is not None:
        frozen.requires_grad_(False)
        built = BuiltModel(built.trunk, None)
    choose_fused(optim.fused)
    with context.megatron_scope():
        chunks = [_wrap(module, context, ddp) for module in built.modules]
        optimizer = _optimizer(chunks, _optimizer_config(built, optim), context, optim.name)
    scheduler = _scheduler(optimizer, optim, steps)
    mtp = chunks[1] if len(chunks) > 1 else None
    offload = OptimizerOffload(optimizer, context.device) if optim.offload == "cpu" else None
    return TrainState(
        context, chunks[0], mtp, optimizer, scheduler, optim.clip_grad, frozen_mtp=frozen, offload=offload
    )


def _wrap(module: BailingModel | MtpLayer, context: ParallelContext, ddp: DdpOptions) -> DistributedDataParallel:
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=ddp.overlap_grad_reduce,
        grad_reduce_in_fp32=True,
        bucket_size=ddp.bucket_elements,
    )
    chunk = DistributedDataParallel(module.config, config, module, pg_collection=context.groups)
    watch_first_gradients(chunk)
    return chunk


def _optimizer(
    chunks: list[DistributedDataParallel], config: OptimizerConfig, context: ParallelContext, name: str
) -> ChainedOptimizer:
    if name == "adamw8bit":
        return build_adamw8bit(chunks, config, context)
    optimizer = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False, pg_collection=context.groups)
    if context.device.type == "cuda":
        _fuse_updates(optimizer)
    return optimizer


def _optimizer_config(built: BuiltModel, optim: OptimConfig) -> OptimizerConfig:
    dtype = built.trunk.config.params_dtype
    return OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        min_lr=optim.lr * optim.min_lr_ratio,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.beta1,
        adam_beta2=optim.beta2,
        adam_eps=optim.eps,
        clip_grad=optim.clip_grad or 0.0,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )


def _fuse_updates(optimizer: ChainedOptimizer) -> None:
    """torch's Adam in one kernel: its default on a GPU holds temporaries as large as the parameters."""
    for part in optimizer.chained_optimizers:
        if isinstance(getattr(part, "optimizer", None), torch.optim.Adam):
            for group in part.optimizer.param_groups:
                group["fused"], group["foreach"] = True, False


def _scheduler(optimizer: ChainedOptimizer, optim: OptimConfig, steps: int) -> OptimizerParamScheduler:
    wsd_decay = optim.decay_steps or max(1, steps // 5)
    cosine_end = optim.warmup_steps + optim.decay_steps if optim.decay_steps else steps
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=optim.lr,
        min_lr=optim.lr * optim.min_lr_ratio,
        lr_warmup_steps=optim.warmup_steps,
        lr_decay_steps=cosine_end if optim.schedule == "cosine" else steps,
        lr_decay_style=_SCHEDULES[optim.schedule],
        wsd_decay_steps=wsd_decay if optim.schedule == "wsd" else None,
        lr_wsd_decay_style="linear" if optim.schedule == "wsd" else None,
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=steps,
        wd_incr_style="constant",
    )
    return scheduler


_SCHEDULES = {"constant": "constant", "cosine": "cosine", "wsd": "WSD"}
