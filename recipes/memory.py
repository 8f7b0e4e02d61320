"""The memory plan of a training run on a GPU: made before anything is loaded, and held against what is measured."""

import math
from dataclasses import replace

import torch

from bailing_mtp.config import DpoConfig, GrpoConfig, PretrainConfig, RolloutConfig, SftConfig
from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.errors import UserError
from bailing_mtp.model.build import build_on_meta
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.rollout.engine import MAX_TEMPLATES
from bailing_mtp.rollout.memory import MemoryPlan
from bailing_mtp.rollout.reduced_head import read_draft_ids
from bailing_mtp.training.activations import FP32, PassSizes, layer_of
from bailing_mtp.training.memory_plan import GIB, PlanInputs, RolloutBytes, TrainingPlan, count_model, require_fit
from bailing_mtp.weights.names import Shard

from .failure import fail_together
from .session import DTYPES, Source, model_settings

TrainedConfig = PretrainConfig | SftConfig | DpoConfig | GrpoConfig
STEPS_BEFORE_MEASURING = 2
"""The first step makes the moments, so that the second is the first that has all of them from its beginning."""
LOGITS_IN_GRAPHS = 3
"""Memory that the graphs of decode steps share, in fp32 logits of all tokens that a full step feeds: 2.7 to 3.7 were
measured at 256 rows."""


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


def rollout_bytes(
    config: GrpoConfig, engine: RolloutConfig, passes: PassSizes, context: ParallelContext
) -> RolloutBytes:
    """Memory of the largest rollout of a run, as the engine will take it."""
    assert engine.context_tokens is not None
    arch, samples = passes.arch, config.sampling.samples_per_prompt
    n_prompts = math.ceil(config.rl.prompts_per_rollout * config.rl.oversample)
    # A rollout of held-out prompts may be larger than one of training.
    most = engine.max_running if config.data.valid_path else -(-n_prompts // context.dp) * samples
    rows = min(engine.max_running, most)
    plan = MemoryPlan.build(
        arch,
        Shard(context.tp, context.tp_rank, context.ep, context.ep_rank),
        engine.speculative_tokens,
        rows,
        min(MAX_TEMPLATES, n_prompts),
        engine.context_tokens,
        min(engine.block_tokens, engine.context_tokens),
        DTYPES[config.model.dtype],
        None if engine.memory_gb is None else int(engine.memory_gb * GIB),
        beside_bytes=_draft_rows_bytes(engine, arch, passes),
    )
    fed_tokens = rows * (engine.speculative_tokens + 1)
    graphs = LOGITS_IN_GRAPHS * fed_tokens * arch.vocab_size // context.tp * FP32 if engine.cuda_graphs else 0
    # A prefill makes the tensors that a forward of training keeps, one block at a time.
    prefill = PassSizes(arch, passes.settings, engine.prefill_tokens, context.tp, context.ep)
    layers = [layer_of(prefill, layer) for layer in arch.trunk_plan()]
    working = max(block.kept + block.again for layer in layers for block in (layer.mixer, layer.mlp))
    return RolloutBytes(plan.total_bytes, graphs, working, stays=engine.keep_memory)


def _draft_rows_bytes(engine: RolloutConfig, arch: Architecture, passes: PassSizes) -> int:
    """Rows of the head that rollout.draft_vocabulary copies."""
    if engine.draft_vocabulary is None:
        return 0
    n_ids = len(read_draft_ids(engine.draft_vocabulary, arch.vocab_size))
    return -(-n_ids // passes.tp) * arch.hidden_size * passes.width
