"""From the section `model` to how a model is built."""

import torch

from bailing_mtp.config import ModelConfig
from bailing_mtp.model.build import BuiltModel
from bailing_mtp.model.settings import ModelSettings

from .sources import Source

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def model_settings(
    model: ModelConfig,
    source: Source,
    recompute: str = "none",
    expert_bias_rate: float = 0.0,
    fused_weight_gradients: bool = False,
) -> ModelSettings:
    """The router weight keeps the checkpoint's dtype, but never less than the model's own (fp32 runs are fp32)."""
    dtype = DTYPES[model.dtype]
    router_dtype = dtype if source.router_dtype is None or dtype is torch.float32 else source.router_dtype
    return ModelSettings(
        dtype=dtype,
        router_dtype=router_dtype,
        backend=model.backend,
        fp8=model.fp8,
        fused_weight_gradients=fused_weight_gradients,
        kda=model.kda,
        experts=model.experts,
        attention=model.attention,
        kernels=model.kernels,
        recompute=recompute,
        expert_bias_rate=expert_bias_rate,
    )


def fp8_note(settings: ModelSettings, built: BuiltModel) -> str:
    """Which linears an FP8 model computes in full precision all the same."""
    from bailing_mtp.model.te import sizes_out_of_fp8

    out = sizes_out_of_fp8(built.trunk)
    if not out:
        return f"model.fp8={settings.fp8}: every linear of the trunk but router and attention gates"
    return (
        f"model.fp8={settings.fp8}: {len(out)} linears of the trunk compute in full precision, as a size is no "
        f"multiple of {settings.size_multiple}: {out[0]}{', ...' if len(out) > 1 else ''}"
    )
