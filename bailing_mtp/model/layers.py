"""Small layers shared by the mixers: RMSNorm, replicated and tensor-parallel linears, RoPE.

Shapes: T tokens, h heads of this rank, d head size, s tokens of this rank's sequence shard (T / tp under
sequence parallel, else T), H hidden size.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F


def replicated_parameter(shape: tuple[int, ...], config: TransformerConfig, dtype: torch.dtype) -> nn.Parameter:
    """A parameter that every tensor-parallel rank holds whole, and whose gradient each rank has only a part of.

    The part (this rank's tokens, or this rank's heads) is completed by megatron-core's finalize_model_grads,
    which sums the gradients of parameters marked `sequence_parallel` over the tensor-parallel group.
    """
    device = None if config.use_cpu_initialization else torch.cuda.current_device()
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
    parameter.sequence_parallel = config.sequence_parallel
    return parameter


def sharded_parameter(
    shape: tuple[int, ...], config: TransformerConfig, dtype: torch.dtype, partition_dim: int = 0
) -> nn.Parameter:
    """A parameter of which each tensor-parallel rank holds its own slice along `partition_dim`."""
    device = None if config.use_cpu_initialization else torch.cuda.current_device()
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
    parameter.tensor_model_parallel = True
    parameter.partition_dim = partition_dim
    parameter.partition_stride = 1
    return parameter


class RmsNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, reduced in fp32."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = replicated_parameter((hidden_size,), config, config.params_dtype)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class ReplicatedLinear(nn.Module):
    """y = x W^T with the whole W on every tensor-parallel rank; x is this rank's sequence shard."""

    def __init__(self, in_features: int, out_features: int, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = replicated_parameter((out_features, in_features), config, config.params_dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class ColumnLinear(ColumnParallelLinear):
    """megatron-core's column-parallel linear, without bias; returns the tensor alone.

    Under sequence parallel the input is this rank's shard [s, 1, in] and the output covers all tokens [T, 1, out/tp].
    """

    def __init__(self, in_features: int, out_features: int, config: TransformerConfig, tp_group: ProcessGroup) -> None:
        super().__init__(
            in_features,
            out_features,
            config=config,
            init_method=_never,
            bias=False,
            gather_output=False,
            tp_group=tp_group,
        )

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


class RowLinear(RowParallelLinear):
    """megatron-core's row-parallel linear, without bias; returns the tensor alone.

    The input is [T, 1, in/tp] over all tokens; under sequence parallel the output is this rank's shard [s, 1, out].
    """

    def __init__(self, in_features: int, out_features: int, config: TransformerConfig, tp_group: ProcessGroup) -> None:
        super().__init__(
            in_features,
            out_features,
            config=config,
            init_method=_never,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=tp_group,
        )

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


def _never(_: Tensor) -> None:
    raise AssertionError("parameters are filled by the weights package, never by megatron-core")


def rope_table(position_ids_T: Tensor, dim: int, theta: float) -> Tensor:
    """Cosines and sines [T, 2, dim/2] in fp32: angle = position * theta^(-2i/dim) (Bailing V3 spec section 2.2)."""
    pairs = torch.arange(0, dim, 2, dtype=torch.float32, device=position_ids_T.device)
    angle = position_ids_T.float()[:, None] * torch.pow(theta, -pairs / dim)
    return torch.stack((angle.cos(), angle.sin()), dim=1)


def apply_rope(x_Thd: Tensor, table: Tensor) -> Tensor:
    """Rotate adjacent pairs (2i, 2i+1) of the last dimension; computed in fp32."""
    cos, sin = (table[:, i, None, :].to(x_Thd.device) for i in (0, 1))
    even, odd = x_Thd.float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rotated.flatten(-2).to(x_Thd.dtype)
