"""Random start of a model, tensor by tensor under its Hugging Face name.

Every HF tensor is drawn whole from a generator keyed by (seed, name) and cut like a loaded one, so a seed gives
the same model in every (tp, ep) layout.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.weights.local_tensors import local_tensors, piece_view
from bailing_mtp.weights.names import ParamMaps, Shard, mtp_map, trunk_map

INITIALIZER_RANGE = 0.02
"""Standard deviation where the config names none (`initializer_range`)."""
DECAY_RANGE = (1e-3, 0.5)
"""KDA channels start with per-token log decays log-uniform in minus this range: memories of 2 to 1000 tokens."""


def init_fresh(
    arch: Architecture, shard: Shard, trunk: nn.Module | None, mtp: nn.Module | None, seed: int
) -> None:
    """Fill every parameter and expert bias of the given modules with this rank's part of a random model."""
    if trunk is not None:
        _fill(trunk, trunk_map(arch, shard), arch, seed)
    if mtp is not None:
        _fill(mtp, mtp_map(arch, shard), arch, seed)


@torch.no_grad()
def _fill(module: nn.Module, maps: ParamMaps, arch: Architecture, seed: int) -> None:
    tensors = local_tensors(module, maps)
    for name, param in maps.items():
        for piece in param.pieces:
            view = piece_view(tensors[name], piece)
            whole = _draw(piece.hf_name, piece.hf_shape, arch, seed, view.device)
            dim, start, stop = piece.held
            view.copy_(whole.narrow(dim, start, stop - start).reshape(view.shape))


def _draw(hf_name: str, shape: tuple[int, ...], arch: Architecture, seed: int, device: torch.device) -> Tensor:
    kind = hf_name.removesuffix(".weight").rpartition(".")[2]
    if kind == "expert_bias":
        return torch.zeros(shape, device=device)
    if kind == "A_log":
        return torch.zeros(shape, device=device)
    if "norm" in kind:
        return torch.ones(shape, device=device)
    digest = hashlib.sha256(f"{seed}/{hf_name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))
    uniform = torch.rand(shape, generator=generator, device=device) if kind in _UNIFORM else None
    if kind == "dt_bias":
        return _decay_bias(uniform, arch.kda_lower_bound)
    if uniform is not None:
        return (2 * uniform - 1) * shape[-1] ** -0.5
    std = float(arch.hf_config.get("initializer_range") or INITIALIZER_RANGE)
    if kind in _INTO_RESIDUAL:
        std /= math.sqrt(2 * arch.num_layers)
    return torch.randn(shape, generator=generator, device=device) * std


_UNIFORM = ("dt_bias", "q_conv1d", "k_conv1d", "v_conv1d")
_INTO_RESIDUAL = ("o_proj", "dense", "down_proj")


def _decay_bias(uniform: Tensor, lower_bound: float | None) -> Tensor:
    """dt_bias that gives log decays in -DECAY_RANGE when A_log and the projected gate are 0."""
    low, high = (math.log(bound) for bound in DECAY_RANGE)
    decay = torch.exp(low + (high - low) * uniform)
    if lower_bound is not None:
        return torch.logit(decay / -lower_bound)
    return torch.log(torch.expm1(decay))
