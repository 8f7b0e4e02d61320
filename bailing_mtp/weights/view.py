"""The trained weights as decoding reads them: a frozen tree of tensors that alias the trainer's storage.

Nothing is copied, stacked or re-laid, so that an optimizer step is visible through an old view at once;
a version number tells whether that has happened.

Shape legend: H hidden size, v vocabulary rows, h heads, n no-position query size, d query size (n + r),
r rotary size, V value size, D key size, C latent rank, Q query rank, W convolution taps, X channels of q, k
and v together, Y rows of the fused KDA projection, F width of an MLP, e experts of this rank, E all experts.
Widths and heads are this rank's.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass

from torch import Tensor, nn

from bailing_mtp.contracts.architecture import Architecture, LayerPlan
from bailing_mtp.contracts.clock import WeightsClock
from bailing_mtp.weights.local_tensors import local_tensors
from bailing_mtp.weights.names import Shard, mtp_map, trunk_map


class StaleWeights(RuntimeError):
    """The weights were trained on after the view was published."""


@dataclass(frozen=True)
class KdaWeights:
    """Bailing V3 spec section 2.1."""

    in_proj_YH: Tensor
    """Rows of q | k | v | f | g | beta of this rank's heads."""
    conv_XW: Tensor
    A_log_h: Tensor
    dt_bias_hD: Tensor
    o_norm_V: Tensor
    out_proj_HhV: Tensor


@dataclass(frozen=True)
class MlaWeights:
    """Bailing V3 spec section 2.2. `q_b` reads the normalised query latent, or the input itself without q_a."""

    q_a_QH: Tensor | None
    q_a_norm_Q: Tensor | None
    q_b: Tensor
    """[h * d, Q], or [h * d, H] without a query latent."""
    kv_a_rows_H: Tensor
    """[C + r, H]."""
    kv_a_norm_C: Tensor
    kv_b_hxC: Tensor
    """[h, n + V, C]: rows of the no-position keys, then of the values, of each head."""
    gate_hH: Tensor
    out_proj_HhV: Tensor


@dataclass(frozen=True)
class DenseWeights:
    """SwiGLU: gate rows, then up rows."""

    gate_up_2FH: Tensor
    down_HF: Tensor
    limit: float | None


@dataclass(frozen=True)
class MoeWeights:
    """Bailing V3 spec section 2.3."""

    router_EH: Tensor
    expert_bias_E: Tensor
    gate_up_e2FH: Tensor
    down_eHF: Tensor
    limit: float | None
    shared: DenseWeights | None


@dataclass(frozen=True)
class LayerWeights:
    """A pre-norm residual layer."""

    plan: LayerPlan
    input_norm_H: Tensor
    post_norm_H: Tensor
    mixer: KdaWeights | MlaWeights
    mlp: DenseWeights | MoeWeights


@dataclass(frozen=True)
class MtpWeights:
    """Bailing V3 spec section 3."""

    enorm_H: Tensor
    hnorm_H: Tensor
    eh_proj_H2H: Tensor
    layer: LayerWeights
    final_norm_H: Tensor


@dataclass(frozen=True)
class WeightsView:
    """What this rank computes with; valid until the next optimizer step."""

    arch: Architecture
    embedding_vH: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm_H: Tensor
    head_vH: Tensor
    mtp: MtpWeights | None
    version: int
    """Optimizer steps that the weights had seen when this view was published."""
    clock: WeightsClock

    def tensors(self) -> list[Tensor]:
        """Every tensor, in a fixed order."""
        return tensors_of(self)

    def require_current(self) -> None:
        """Raises StaleWeights when an optimizer step has changed the weights under this view."""
        if self.clock.trained != self.version:
            raise StaleWeights(
                f"these weights were published at version {self.version}, but the trainer is at "
                f"{self.clock.trained}: publish again"
            )


def tensors_of(node: object) -> list[Tensor]:
    """Every tensor of a view or of a part of one, in a fixed order."""
    if isinstance(node, Tensor):
        return [node]
    if isinstance(node, tuple):
        return [tensor for part in node for tensor in tensors_of(part)]
    is_weights = is_dataclass(node) and type(node).__name__.endswith(("Weights", "View"))
    return [tensor for part in fields(node) for tensor in tensors_of(getattr(node, part.name))] if is_weights else []


def publish(trunk: nn.Module, mtp: nn.Module | None, shard: Shard, clock: WeightsClock) -> WeightsView:
    """This rank's weights as they are now. `trunk` and `mtp` are the bare modules, outside any wrapper.

    Any pending gather of updated parameters must be complete.
    """
    arch: Architecture = trunk.arch
    tensors = local_tensors(trunk, trunk_map(arch, shard))
    embedding_vH = tensors["embedding.weight"]
    return WeightsView(
        arch=arch,
        embedding_vH=embedding_vH,
        layers=tuple(
            _layer(tensors, f"decoder.layers.{plan.index}.", plan, arch) for plan in arch.trunk_plan()
        ),
        final_norm_H=tensors["decoder.final_layernorm.weight"],
        head_vH=embedding_vH if arch.tie_embeddings else tensors["head.weight"],
        mtp=None if mtp is None else _mtp(local_tensors(mtp, mtp_map(arch, shard)), arch),
        version=clock.trained,
        clock=clock,
    )


def _mtp(tensors: dict[str, Tensor], arch: Architecture) -> MtpWeights:
    return MtpWeights(
        enorm_H=tensors["enorm.weight"],
        hnorm_H=tensors["hnorm.weight"],
        eh_proj_H2H=tensors["eh_proj.weight"],
        layer=_layer(tensors, "block.", arch.mtp_plan(), arch),
        final_norm_H=tensors["final_layernorm.weight"],
    )


def _layer(tensors: dict[str, Tensor], prefix: str, plan: LayerPlan, arch: Architecture) -> LayerWeights:
    own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    mixer = _kda if plan.mixer == "kda" else _mla
    return LayerWeights(
        plan=plan,
        input_norm_H=own["input_layernorm.weight"],
        post_norm_H=own["pre_mlp_layernorm.weight"],
        mixer=mixer(own, arch),
        mlp=_moe(own, plan) if plan.mlp == "moe" else _swiglu(own, "mlp.", None),
    )


def _kda(own: dict[str, Tensor], arch: Architecture) -> KdaWeights:
    at = "self_attention."
    return KdaWeights(
        in_proj_YH=own[at + "in_proj.weight"],
        conv_XW=own[at + "conv_weight"],
        A_log_h=own[at + "A_log"],
        dt_bias_hD=own[at + "dt_bias"].view(-1, arch.kda_head_dim),
        o_norm_V=own[at + "o_norm.weight"],
        out_proj_HhV=own[at + "out_proj.weight"],
    )


def _mla(own: dict[str, Tensor], arch: Architecture) -> MlaWeights:
    at = "self_attention."
    direct = arch.q_lora_rank is None
    head_rows = arch.qk_nope_head_dim + arch.v_head_dim
    return MlaWeights(
        q_a_QH=None if direct else own[at + "q_a_proj.weight"],
        q_a_norm_Q=None if direct else own[at + "q_a_layernorm.weight"],
        q_b=own[at + ("q_proj.weight" if direct else "q_b_proj.weight")],
        kv_a_rows_H=own[at + "kv_a_proj.weight"],
        kv_a_norm_C=own[at + "kv_a_layernorm.weight"],
        kv_b_hxC=own[at + "kv_b_proj.weight"].view(-1, head_rows, arch.kv_lora_rank),
        gate_hH=own[at + "gate_proj.weight"],
        out_proj_HhV=own[at + "out_proj.weight"],
    )


def _moe(own: dict[str, Tensor], plan: LayerPlan) -> MoeWeights:
    has_shared = "mlp.shared_experts.down.weight" in own
    return MoeWeights(
        router_EH=own["mlp.router.weight"],
        expert_bias_E=own["mlp.router.expert_bias"],
        gate_up_e2FH=own["mlp.experts.gate_up"],
        down_eHF=own["mlp.experts.down"],
        limit=plan.swiglu_limit,
        shared=_swiglu(own, "mlp.shared_experts.", plan.shared_swiglu_limit) if has_shared else None,
    )


def _swiglu(own: dict[str, Tensor], at: str, limit: float | None) -> DenseWeights:
    return DenseWeights(own[at + "gate_up.weight"], own[at + "down.weight"], limit)
