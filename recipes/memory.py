"""The memory plan of a training run on a GPU: made before anything is loaded, and held against what is measured."""

from dataclasses import replace

import torch

from bailing_mtp.config import DpoConfig, GrpoConfig, PretrainConfig, RolloutConfig, SftConfig
from bailing_mtp.errors import UserError
from bailing_mtp.model.build import build_on_meta
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.training.activations import PassSizes
from bailing_mtp.training.memory_plan import GIB, PlanInputs, TrainingPlan, count_model, require_fit

from .failure import fail_together
from .rollout_memory import rollout_bytes
from .session import Source, model_settings

TrainedConfig = PretrainConfig | SftConfig | DpoConfig | GrpoConfig
STEPS_BEFORE_MEASURING = 2
"""The first step makes the moments, so that the second is the first that has all of them from its beginning."""


class MemoryWatch:
    """What was planned beside the largest use so far. Nothing on the CPU."""

    def __init__(self, context: ParallelContext, plan: TrainingPlan | None = None) -> None:
        self._context, self._plan, self._has_told = context, plan, False

    def metrics(self) -> dict[str, float]:
        """Of this rank's GPU, GiB."""
        device = self._context.device
        if device.type != "cuda":
            return {}
        peak_gb = torch.cuda.max_memory_allocated(device) / GIB
        values = {"allocated": peak_gb, "reserved": torch.cuda.max_memory_reserved(device) / GIB}
        if self._plan is not None:
            values |= {"planned": self._plan.peak[1] / GIB, "peak": peak_gb}
        return {f"memory/{name}_gb": value for name, value in values.items()}

    def tell(self, n_steps: int, is_last: bool) -> None:
        """Once, after the first steps of a run: plan and measurement in one line."""
        if self._plan is None or self._has_told or not (is_last or n_steps >= STEPS_BEFORE_MEASURING):
            return
        self._has_told, values = True, self.metrics()
        if self._context.is_writer:
            planned, measured = values["memory/planned_gb"], values["memory/peak_gb"]
            print(f"memory: planned {planned:.1f} GiB, measured {measured:.1f} GiB", flush=True)


def watch_memory(
    config: TrainedConfig, source: Source, context: ParallelContext, engine: RolloutConfig | None = None
) -> MemoryWatch:
    """Plan and print what this rank will need of its GPU. Collective.

    engine: rollout.* of grpo with its context length. Raises UserError on all ranks, naming keys that would help, where
    it cannot fit on some.
    """
    if context.device.type != "cuda":
        return MemoryWatch(context)
    free_bytes, _ = torch.cuda.mem_get_info(context.device)
    room_bytes = free_bytes + torch.cuda.memory_reserved(context.device)
    plan, error = None, None
    try:
        plan = require_fit(plan_inputs(config, source, context, engine), room_bytes)
    except UserError as caught:
        error = caught
    fail_together(error)
    assert plan is not None
    if context.is_writer:
        print("\n".join(plan.lines(room_bytes)), flush=True)
    return MemoryWatch(context, plan)


def plan_inputs(
    config: TrainedConfig, source: Source, context: ParallelContext, engine: RolloutConfig | None = None
) -> PlanInputs:
    """What a plan is computed from. Raises UserError naming rollout.memory_gb where that is too little."""
    train, arch = config.train, source.arch
    settings = model_settings(config.model, source, train.recompute, config.optim.expert_bias_rate)
    passes = PassSizes(arch, settings, train.microbatch_tokens, context.tp, context.ep)
    # Parameters are the same with any kernels and layers, and those of fla take long to import.
    plain = replace(
        settings, kda="torch", kernels="torch", backend="local", fp8=None, fused_weight_gradients=False
    )
    built = build_on_meta(arch, plain, context)
    trained, frozen, reference_bytes = [built.trunk], [], 0
    if built.mtp is not None and config.mtp.loss_scale is not None:
        trained.append(built.mtp)
    elif built.mtp is not None and engine is not None and engine.speculative_tokens:
        frozen.append(built.mtp)
    if isinstance(config, GrpoConfig) and config.rl.kl_coef > 0:
        reference_bytes = count_model([built.trunk]).weight_bytes
    return PlanInputs(
        counts=count_model(trained, frozen),
        passes=passes,
        optim=config.optim,
        mtp=config.mtp,
        dp=context.dp,
        expert_dp=context.world_size // context.ep,
        reference_bytes=reference_bytes,
        rollout=rollout_bytes(config, engine, passes, context) if isinstance(config, GrpoConfig) and engine else None,
        least_tokens=config.data.seq_tokens * (2 if isinstance(config, DpoConfig) else 1),
    )
