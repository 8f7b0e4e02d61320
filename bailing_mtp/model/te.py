"""transformer-engine's norms, linears and grouped GEMM, in the place of those of `layers` and `mlp`.

Linears and norms are megatron-core's wrappers. Parameters have the names, shapes and dtypes of the local ones, so that
checkpoints and the view that decoding reads know no difference; FP8 copies live for one product.
Written against the documented interface of transformer-engine 2.3 and later, and not yet run on a GPU.

Shapes: T tokens of the pack, s of this rank's sequence shard, n rows sorted by expert, e experts of this rank,
H hidden size, F width of an expert.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TELinear,
    TENorm,
    TERowParallelLinear,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformer_engine import pytorch as te

from bailing_mtp.errors import UserError
from bailing_mtp.model.mlp import StackedExperts, swiglu
from bailing_mtp.model.settings import FP8_RECIPES

RmsNorm = TENorm
"""(config, hidden_size, eps), as layers.RmsNorm."""


class _Linear:
    """Returns the tensor alone. A weight whose sizes no FP8 kernel takes stays in full precision, also inside a
    layer that computes in FP8; `sizes_out_of_fp8` names such weights."""

    config: TransformerConfig
    weight: nn.Parameter

    @property
    def fits_fp8(self) -> bool:
        return _fits(self.config, self.weight.shape)

    def forward(self, x: Tensor) -> Tensor:
        in_full = self.config.fp8 is not None and not self.fits_fp8
        with te.fp8_autocast(enabled=False) if in_full else contextlib.nullcontext():
            return super().forward(x)[0]


class ReplicatedLinear(_Linear, TELinear):
    """As layers.ReplicatedLinear: [s, 1, in] -> [s, 1, out], the whole weight on every tensor-parallel rank."""

    def __init__(self, in_features: int, out_features: int, config: TransformerConfig) -> None:
        super().__init__(
            in_features,
            out_features,
            parallel_mode="duplicated",
            config=config,
            init_method=_left_unfilled,
            bias=False,
            skip_bias_add=False,
            skip_weight_param_allocation=False,
        )


class ColumnLinear(_Linear, TEColumnParallelLinear):
    """As layers.ColumnLinear: [s, 1, in] -> [T, 1, out / tp]."""

    def __init__(self, in_features: int, out_features: int, config: TransformerConfig, tp_group: ProcessGroup) -> None:
        super().__init__(in_features, out_features, gather_output=False, **_sharded(config, tp_group))


class RowLinear(_Linear, TERowParallelLinear):
    """As layers.RowLinear: [T, 1, in / tp] -> [s, 1, out]."""

    def __init__(self, in_features: int, out_features: int, config: TransformerConfig, tp_group: ProcessGroup) -> None:
        super().__init__(in_features, out_features, input_is_parallel=True, **_sharded(config, tp_group))


def _sharded(config: TransformerConfig, tp_group: ProcessGroup) -> dict[str, Any]:
    """What both tensor-parallel linears are made with."""
    return {
        "config": config,
        "init_method": _left_unfilled,
        "bias": False,
        "skip_bias_add": False,
        "is_expert": False,
        "tp_group": tp_group,
    }


class Experts(StackedExperts):
    """StackedExperts whose products are transformer-engine's GroupedLinear, with the stacked weights lent to it.

    GroupedLinear would own a parameter per expert. As views of one buffer they would lose each other where
    megatron-core lays parameters out anew (in reverse, each aligned); so the stacked weights stay the only parameters,
    and a GroupedLinear without storage gets their slices for the duration of a call. Autograd stacks the slices'
    gradients. Sizes are read on the host, which waits for the device once a layer.
    """

    def __init__(self, num_local_experts: int, config: TransformerConfig, limit: float | None = None, **_: Any) -> None:
        super().__init__(num_local_experts, config, limit)
        products = [_lent(weight) for weight in (self.gate_up, self.down)]
        # In a tuple, which hides a module and its parameters from this one.
        self._products = (products,)
        self._padding: tuple[tuple[nn.Module, nn.Module], ...] = ()
        if config.fp8 is not None:
            multiple = FP8_RECIPES[config.fp8_recipe].multiple
            if not _fits(config, self.gate_up.shape[1:]) or not _fits(config, self.down.shape[1:]):
                raise UserError(
                    f"model.fp8: {config.fp8_recipe!r} needs moe_intermediate_size={config.moe_ffn_hidden_size} and "
                    f"hidden_size={config.hidden_size} to be multiples of {multiple}"
                )
            pad, unpad = (kind(num_local_experts, multiple) for kind in (te.Fp8Padding, te.Fp8Unpadding))
            self._padding = ((pad, unpad),)

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        if not tokens.shape[0]:
            return super().forward(tokens, tokens_per_expert, probs)
        weights_n1, counts = probs[:, None].to(tokens.dtype), tokens_per_expert.tolist()
        if not self._padding:
            return self._mlp(tokens, weights_n1, counts), None
        ((pad, unpad),) = self._padding
        tokens, padded = pad(tokens, counts)
        weights_n1, _ = pad(weights_n1, counts)
        return unpad(self._mlp(tokens, weights_n1, padded), counts), None

    def _mlp(self, tokens_nH: Tensor, weights_n1: Tensor, counts: Sequence[int]) -> Tensor:
        ((gate_up, down),) = self._products
        act_nF = swiglu(_product(gate_up, self.gate_up, tokens_nH, counts), self.limit) * weights_n1
        return _product(down, self.down, act_nF, counts)


def _lent(stacked: Tensor) -> nn.Module:
    """A GroupedLinear of these shapes without storage."""
    n_experts, n_out, n_in = stacked.shape
    return te.GroupedLinear(n_experts, n_in, n_out, bias=False, params_dtype=stacked.dtype, device="meta")


def _product(grouped: nn.Module, stacked: Tensor, x: Tensor, counts: Sequence[int]) -> Tensor:
    slices = {f"weight{expert}": weight for expert, weight in enumerate(stacked.unbind(0))}
    return torch.func.functional_call(grouped, slices, (x, list(counts)), tie_weights=False)


def sizes_out_of_fp8(model: nn.Module) -> list[str]:
    """Names and shapes of the weights of linears that an FP8 model computes in full precision for their sizes."""
    return [
        f"{name}.weight {tuple(module.weight.shape)}"
        for name, module in model.named_modules()
        if isinstance(module, _Linear) and module.config.fp8 is not None and not module.fits_fp8
    ]


def _fits(config: TransformerConfig, shape: Sequence[int]) -> bool:
    return config.fp8 is None or not any(size % FP8_RECIPES[config.fp8_recipe].multiple for size in shape)


def _left_unfilled(_: Tensor) -> None:
    """The weights package fills parameters."""
