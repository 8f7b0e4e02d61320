"""How a model is built (dtype, kernels, recompute), and megatron-core's view of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.transformer import TransformerConfig

from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.errors import UserError
from bailing_mtp.parallel.context import ParallelContext


@dataclass(frozen=True)
class Fp8Recipe:
    """What a way of scaling FP8 tensors asks for. None keeps state between steps (delayed scaling does, and a
    checkpoint would have to hold it)."""

    format: Literal["e4m3", "hybrid"]
    """hybrid: e5m2 for gradients."""
    multiple: int
    """Divides every size of a product: tokens of a rank, rows and columns of a weight."""
    capability: tuple[int, int]
    """Lowest compute capability of a device that has it."""


FP8_RECIPES = {
    "tensorwise": Fp8Recipe("hybrid", 16, (8, 9)),
    "blockwise": Fp8Recipe("e4m3", 16, (9, 0)),
    "mxfp8": Fp8Recipe("e4m3", 32, (10, 0)),
}
"""By megatron-core's names."""


@dataclass(frozen=True)
class ModelSettings:
    """Choices that do not change what the model computes, only how.

    dtype: of the parameters (A_log, dt_bias and expert_bias are fp32 everywhere).
    router_dtype: of the router weight, as the checkpoint stores it; its matmul is always fp32.
    backend: whose linears, norms and grouped GEMM: "local", or "te" for transformer-engine's (GPU).
    fp8: a name of FP8_RECIPES, for the trunk's te linears and experts; None computes them in `dtype`.
    fused_weight_gradients: apex adds a linear's weight gradient to the fp32 buffer in the GEMM that makes it.
    kda: "torch" (the twin, any device) or "fla" (GPU kernels).
    experts: "loop" over the experts behind megatron-core's dispatcher (any device), or "grouped": one grouped GEMM over
    all of them, tokens sorted and exchanged by this package (backend "local").
    attention: "sdpa", torch's own (on a GPU in bf16 its fastest kernel that takes the pack), or "flash": flash-attn's.
    kernels: "torch", or "triton" for the element-wise pieces between the matrix products (GPU).
    recompute: "selective" computes the experts' sorted inputs and SwiGLU (of grouped experts) and KDA between its
    projections again in the backward, "full" whole layers.
    expert_bias_rate: step of the online balance; 0 leaves the bias as loaded.
    """

    dtype: torch.dtype
    router_dtype: torch.dtype
    backend: Literal["local", "te"] = "local"
    fp8: str | None = None
    fused_weight_gradients: bool = False
    kda: Literal["torch", "fla"] = "torch"
    experts: Literal["loop", "grouped"] = "loop"
    attention: Literal["sdpa", "flash"] = "sdpa"
    kernels: Literal["torch", "triton"] = "torch"
    recompute: Literal["none", "selective", "full"] = "none"
    expert_bias_rate: float = 0.0

    @property
    def size_multiple(self) -> int:
        """What the number of tokens on a rank must be a multiple of."""
        return 1 if self.fp8 is None else FP8_RECIPES[self.fp8].multiple


def check_fp8_device(fp8: str | None, device: torch.device) -> None:
    """Raises UserError where this GPU does not have the recipe."""
    if fp8 is None or device.type != "cuda":
        return
    needed, found = FP8_RECIPES[fp8].capability, torch.cuda.get_device_capability(device)
    if found < needed:
        raise UserError(
            f"model.fp8: {fp8!r} needs compute capability {needed[0]}.{needed[1]} and this GPU has "
            f"{found[0]}.{found[1]}"
        )


def transformer_config(arch: Architecture, settings: ModelSettings, context: ParallelContext) -> TransformerConfig:
    """megatron-core's configuration of this model on these ranks.

    Sequence parallel follows tp > 1. Gradients are sums (calculate_per_token_loss): every loss is divided
    by its own global count before backward, so DDP must not average.
    """
    return TransformerConfig(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        num_attention_heads=arch.num_heads,
        ffn_hidden_size=arch.intermediate_size,
        kv_channels=arch.kda_head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=arch.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        params_dtype=settings.dtype,
        bf16=settings.dtype is torch.bfloat16,
        pipeline_dtype=settings.dtype,
        use_cpu_initialization=context.device.type != "cuda",
        perform_initialization=False,
        tensor_model_parallel_size=context.tp,
        sequence_parallel=context.tp > 1,
        expert_model_parallel_size=context.ep,
        expert_tensor_parallel_size=1,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=settings.fused_weight_gradients,
        **_te_options(settings),
        **_moe_options(arch, settings),
        **_recompute_options(settings),
    )


def _te_options(settings: ModelSettings) -> dict[str, Any]:
    if settings.backend != "te":
        return {}
    # megatron-core's wrappers keep the FP8 weights of the first microbatch until its own training loop, which is not
    # used here, announces the next step: without this, products would go on with the weights of before the update.
    options: dict[str, Any] = {"disable_parameter_transpose_cache": True}
    if settings.fp8 is not None:
        options |= {"fp8": FP8_RECIPES[settings.fp8].format, "fp8_recipe": settings.fp8}
    return options


def _moe_options(arch: Architecture, settings: ModelSettings) -> dict[str, Any]:
    plans = arch.trunk_plan() + ((arch.mtp_plan(),) if arch.num_mtp_layers else ())
    if all(plan.mlp == "dense" for plan in plans):
        return {}
    return {
        "num_moe_experts": arch.num_experts,
        "moe_layer_freq": [int(plan.mlp == "moe") for plan in arch.trunk_plan()],
        "moe_ffn_hidden_size": arch.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": arch.shared_intermediate_size,
        "moe_router_topk": arch.experts_per_token,
        "moe_router_num_groups": arch.num_groups,
        "moe_router_group_topk": arch.groups_per_token,
        "moe_router_topk_scaling_factor": arch.routed_scaling_factor,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": settings.expert_bias_rate,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
    }


def _recompute_options(settings: ModelSettings) -> dict[str, Any]:
    # What selective recompute leaves out is decided by our own layers.
    if settings.recompute != "full":
        return {}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
