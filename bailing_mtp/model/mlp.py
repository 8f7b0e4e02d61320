"""Dense SwiGLU MLP and the shared expert, tensor-parallel over the width.

Shapes: s tokens of this rank's sequence shard, H hidden size, F whole width, f = F / tp.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F

from bailing_mtp.model import fused


def swiglu(gate_up: Tensor, limit: float | None) -> Tensor:
    """silu(gate) * up of the two halves of the last dimension.

    With a limit L: min(silu(gate), L) * clamp(up, -L, L) (Bailing V3 spec section 1, SwiGLU limits).
    """
    gate, up = gate_up.chunk(2, dim=-1)
    gate = F.silu(gate)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * up


class SwiGluMlp(nn.Module):
    """down(swiglu(gate_up(x))). A rank holds its gate rows, then its up rows, in one weight.

    layers: the module of the linears (model.layers or model.te).
    kernels: the module that computes SwiGLU in one pass; None composes it of torch's functions.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        layers: ModuleType,
        width: int,
        limit: float | None = None,
        kernels: ModuleType | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.limit, self.kernels = limit, kernels
        self.gate_up = layers.ColumnLinear(config.hidden_size, 2 * width, config, pg_collection.tp)
        self.down = layers.RowLinear(width, config.hidden_size, config, pg_collection.tp)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, None]:
        """[s, 1, H] -> ([s, 1, H], no bias), as megatron-core's layer expects of an MLP."""
        gate_up = self.gate_up(x)
        if self.kernels is None:
            return self.down(swiglu(gate_up, self.limit)), None
        return self.down(fused.swiglu(self.kernels, gate_up, self.limit)), None


class SharedExpert(SwiGluMlp):
    """The expert that every token passes, unscaled and ungated."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]

    def backward_dw(self) -> None:
        """megatron-core's hook for delayed weight gradients; ours are never delayed."""


class StackedExperts(nn.Module):
    """This rank's experts as two stacked weights: gate_up [e, 2F, H] (gate rows, then up rows), down [e, H, F].

    Decoding reads the same tensors in place, so they are never re-laid. Expert tensor parallel is 1.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        limit: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.limit = limit
        width, hidden = config.moe_ffn_hidden_size, config.hidden_size
        self.gate_up = _expert_parameter((num_local_experts, 2 * width, hidden), config)
        self.down = _expert_parameter((num_local_experts, hidden, width), config)

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Tokens sorted by expert [n, H], their counts [e] and route weights [n] -> ([n, H], no bias).

        Every expert takes part, also with zero tokens: its weight then gets a zero gradient in this microbatch,
        so that data-parallel gradient reduction, which counts one gradient per parameter, never waits for it.
        """
        weights_n1 = probs[:, None].to(tokens.dtype)
        counts = tokens_per_expert.tolist()
        pieces = zip(
            tokens.split(counts), weights_n1.split(counts), self.gate_up.unbind(0), self.down.unbind(0), strict=True
        )
        outputs = [
            F.linear(swiglu(F.linear(x, gate_up), self.limit) * weights, down) for x, weights, gate_up, down in pieces
        ]
        return torch.cat(outputs), None

    def backward_dw(self) -> None:
        """megatron-core's hook for delayed weight gradients; ours are never delayed."""


def _expert_parameter(shape: tuple[int, ...], config: TransformerConfig) -> nn.Parameter:
    device = None if config.use_cpu_initialization else torch.cuda.current_device()
    parameter = nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
    # Always an expert-parallel parameter, also at ep=1: the optimizer then has one structure in every
    # layout, which is what makes its state reshardable.
    parameter.allreduce = False
    parameter.tensor_model_parallel = True
    parameter.partition_dim = 0
    parameter.partition_stride = 1
    return parameter
