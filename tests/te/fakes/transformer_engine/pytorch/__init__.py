from transformer_engine.pytorch import distributed, optimizers
from transformer_engine.pytorch.fp8 import fp8_autocast, fp8_model_init
from transformer_engine.pytorch.layers import (
    DotProductAttention,
    Fp8Padding,
    Fp8Unpadding,
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    Linear,
    RMSNorm,
)

__all__ = [
    "DotProductAttention", "Fp8Padding", "Fp8Unpadding", "GroupedLinear", "LayerNorm", "LayerNormLinear", "Linear",
    "RMSNorm", "distributed", "fp8_autocast", "fp8_model_init", "optimizers",
]  # fmt: skip
