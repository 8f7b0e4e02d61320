"""megatron-core layer specs from the layer plan."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from bailing_mtp.contracts.architecture import Architecture, LayerPlan
from bailing_mtp.model.kda import KdaMixer
from bailing_mtp.model.mla import GatedMla
from bailing_mtp.model.mlp import SharedExpert, StackedExperts, SwiGluMlp
from bailing_mtp.model.moe import GroupedMoeLayer
from bailing_mtp.model.replay import TrunkLayer
from bailing_mtp.model.router import GroupLimitedRouter
from bailing_mtp.model.settings import ModelSettings

ATTENTION_KERNELS = {"sdpa": "bailing_mtp.kernels.attention", "flash": "bailing_mtp.kernels.flash"}
ELEMENTWISE_KERNELS = {"torch": "bailing_mtp.kernels.reference.train", "triton": "bailing_mtp.kernels.triton.train"}
HEAD_KERNELS = "bailing_mtp.kernels.triton.head"
LAYERS = {"local": "bailing_mtp.model.layers", "te": "bailing_mtp.model.te"}
KDA_KERNELS = {"torch": "bailing_mtp.kernels.reference.kda", "fla": "bailing_mtp.kernels.kda"}


def head_kernels(settings: ModelSettings) -> ModuleType | None:
    """One-pass kernels over the head's logits, None for compositions of torch's functions."""
    return None if settings.kernels == "torch" else importlib.import_module(HEAD_KERNELS)


def layer_module(settings: ModelSettings) -> ModuleType:
    """Where linears and norms come from."""
    return importlib.import_module(LAYERS[settings.backend])


def trunk_spec(arch: Architecture, settings: ModelSettings) -> TransformerBlockSubmodules:
    """The trunk: one spec per planned layer, and the final norm."""
    layers, n_routed = [], 0
    for plan in arch.trunk_plan():
        routes = plan.mlp == "moe"
        params = {"expert_layer": n_routed if routes else None}
        layers.append(ModuleSpec(module=TrunkLayer, params=params, submodules=layer_submodules(plan, arch, settings)))
        n_routed += routes
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=layer_module(settings).RmsNorm)


def layer_submodules(plan: LayerPlan, arch: Architecture, settings: ModelSettings) -> TransformerLayerSubmodules:
    """Pre-norm residual layer: mixer, then MLP (Bailing V3 spec section 2)."""
    norm = layer_module(settings).RmsNorm
    return TransformerLayerSubmodules(
        input_layernorm=norm,
        self_attention=_mixer(plan, arch, settings),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=norm,
        mlp=_mlp(plan, arch, settings),
        mlp_bda=get_bias_dropout_add,
    )


def _mixer(plan: LayerPlan, arch: Architecture, settings: ModelSettings) -> ModuleSpec:
    if plan.mixer == "mla":
        attention = importlib.import_module(ATTENTION_KERNELS[settings.attention])
        params = {"arch": arch, "layers": layer_module(settings), "kernels": attention}
        return ModuleSpec(module=GatedMla, params=params)
    params = {
        "arch": arch,
        "layers": layer_module(settings),
        "kernels": importlib.import_module(KDA_KERNELS[settings.kda]),
        "elementwise": _fused_kernels(settings),
        "recompute": settings.recompute == "selective",
    }
    return ModuleSpec(module=KdaMixer, params=params)


def _fused_kernels(settings: ModelSettings) -> ModuleType | None:
    """The element-wise kernels, None for compositions of torch's functions."""
    return None if settings.kernels == "torch" else importlib.import_module(ELEMENTWISE_KERNELS[settings.kernels])


def _mlp(plan: LayerPlan, arch: Architecture, settings: ModelSettings) -> functools.partial:
    of_both = {"layers": layer_module(settings), "kernels": _fused_kernels(settings)}
    if plan.mlp == "dense":
        return functools.partial(SwiGluMlp, width=arch.intermediate_size, **of_both)
    shared = None
    if arch.shared_intermediate_size:
        shared = functools.partial(
            SharedExpert, width=arch.shared_intermediate_size, limit=plan.shared_swiglu_limit, **of_both
        )
    layer: functools.partial = functools.partial(MoELayer)
    if settings.backend == "te":
        experts = functools.partial(layer_module(settings).Experts, limit=plan.swiglu_limit)
    else:
        experts = functools.partial(StackedExperts, limit=plan.swiglu_limit)
        if settings.experts == "grouped":
            layer = functools.partial(
                GroupedMoeLayer,
                kernels=importlib.import_module(ELEMENTWISE_KERNELS[settings.kernels]),
                keeps_inputs=settings.recompute != "selective",
            )
    return functools.partial(
        layer,
        submodules=MoESubmodules(
            experts=experts,
            shared_experts=shared,
            router=functools.partial(GroupLimitedRouter, weight_dtype=settings.router_dtype),
        ),
    )
