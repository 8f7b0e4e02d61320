"""Modules. CALLS notes each product: the module, and the recipe in force or None."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

CALLS: list[tuple[nn.Module, Recipe | None]] = []


def _note(module: nn.Module, *matrices: Tensor) -> None:
    recipe = FP8GlobalStateManager.get_fp8_recipe()
    CALLS.append((module, recipe))
    if recipe is not None:
        for x in matrices:
            rows, columns = x.numel() // x.shape[-1], x.shape[-1]
            assert not rows % recipe.multiple and not columns % recipe.multiple, (tuple(x.shape), type(recipe))


class _IntoMainGrad(torch.autograd.Function):
    """Adds the weight's gradient to weight.main_grad and hands on one that nobody may read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        ctx.weight.main_grad.add_(grad.flatten(0, -2).t() @ x.flatten(0, -2))
        ctx.weight.grad_added_to_main_grad = True
        return grad @ weight, torch.full_like(weight, float("nan"))


class Linear(nn.Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
    ) -> None:
        super().__init__()
        assert parallel_mode in (None, "column", "row") and init_method is not None and not bias and tp_size == 1
        self.parallel_mode, self.fuse_wgrad_accumulation = parallel_mode, fuse_wgrad_accumulation
        unfilled = torch.full((out_features, in_features), float("nan"), dtype=params_dtype, device=device)
        self.weight = nn.Parameter(unfilled)
        self.weight.tensor_model_parallel = True
        self.weight.partition_dim = 1 if parallel_mode == "row" else 0
        self.weight.partition_stride = 1
        init_method(self.weight)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        assert is_first_microbatch is None, "would keep the FP8 weights of an earlier step"
        assert inp.dtype is self.weight.dtype
        _note(self, inp, self.weight)
        if self.fuse_wgrad_accumulation and self.weight.requires_grad:
            return _IntoMainGrad.apply(inp, self.weight)
        return F.linear(inp, self.weight)


class GroupedLinear(nn.Module):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        device: Any = "cuda",
    ) -> None:
        super().__init__()
        assert not bias
        self.num_gemms = num_gemms
        for i in range(num_gemms):
            weight = torch.empty(out_features, in_features, dtype=params_dtype, device=device)
            self.register_parameter(f"weight{i}", nn.Parameter(weight))

    def forward(self, inp: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Tensor:
        assert is_first_microbatch is None and isinstance(m_splits, list) and len(m_splits) == self.num_gemms
        weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        pieces = inp.split(m_splits)
        _note(self, *pieces, *weights)
        return torch.cat([F.linear(x, weight) for x, weight in zip(pieces, weights, strict=True)])


class RMSNorm(nn.Module):
    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        device: Any = "cuda",
    ) -> None:
        super().__init__()
        assert not zero_centered_gamma
        self.weight, self.eps = nn.Parameter(torch.ones(normalized_shape, dtype=params_dtype, device=device)), eps
        if sequence_parallel is not None:
            self.weight.sequence_parallel = sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        _note(self)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Fp8Padding(nn.Module):
    """Rows of zeros after each group, up to a multiple."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size

    def forward(self, inp: Tensor, m_splits: list[int]) -> tuple[Tensor, list[int]]:
        assert len(m_splits) == self.num_gemms
        padded = [self.padded(rows) for rows in m_splits]
        groups = zip(inp.split(m_splits), m_splits, padded, strict=True)
        return torch.cat([F.pad(x, (0, 0, 0, whole - rows)) for x, rows, whole in groups]), padded

    def padded(self, rows: int) -> int:
        return -(-rows // self.align_size) * self.align_size


class Fp8Unpadding(Fp8Padding):
    def forward(self, inp: Tensor, m_splits: list[int]) -> Tensor:
        padded = [self.padded(rows) for rows in m_splits]
        return torch.cat([x[:rows] for x, rows in zip(inp.split(padded), m_splits, strict=True)])


class LayerNorm(nn.Module):
    pass


class LayerNormLinear(nn.Module):
    pass


class DotProductAttention(nn.Module):
    pass
