"""What a Bailing V3 (Ling-3.0) model is made of: sizes, variants, and the plan of its layers.

Read from a Hugging Face `config.json`, or from a preset written with the same keys
(Bailing V3 spec section 1). Variants that this code does not compute are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from bailing_mtp.contracts.hf_config import HfConfigReader, UnsupportedArchitecture

__all__ = ["Architecture", "LayerPlan", "UnsupportedArchitecture"]

HF_ARCHITECTURE = "BailingMoeV3ForCausalLM"


@dataclass(frozen=True)
class LayerPlan:
    """One transformer layer; `index` is its number in the checkpoint (the MTP layer's is num_layers)."""

    index: int
    mixer: Literal["kda", "mla"]
    mlp: Literal["dense", "moe"]
    swiglu_limit: float | None = None
    shared_swiglu_limit: float | None = None
    is_mtp: bool = False


@dataclass(frozen=True)
class Architecture:
    """Sizes and constants of one model. Sizes are whole (not this rank's)."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_mtp_layers: int
    layer_group_size: int
    first_k_dense: int
    num_heads: int
    kda_head_dim: int
    v_head_dim: int
    conv_kernel: int
    kda_lower_bound: float | None
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    rope_theta: float
    max_positions: int
    rms_norm_eps: float
    tie_embeddings: bool
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int | None
    experts_per_token: int
    num_groups: int
    groups_per_token: int
    routed_scaling_factor: float
    shared_intermediate_size: int | None
    swiglu_limits: tuple[float | None, ...]
    shared_swiglu_limits: tuple[float | None, ...]
    hf_config: Mapping[str, Any] = field(compare=False, repr=False, default_factory=dict)
    """The config this was read from, unchanged, so that an export can write it back."""

    @property
    def qk_head_dim(self) -> int:
        """MLA query and key size per head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kda_in_rows(self) -> tuple[int, ...]:
        """Rows of q, k, v, f, g, beta in the fused KDA input projection, all heads."""
        n_heads, d_k, d_v = self.num_heads, self.kda_head_dim, self.v_head_dim
        return (n_heads * d_k, n_heads * d_k, n_heads * d_v, n_heads * d_k, n_heads * d_v, n_heads)

    def trunk_plan(self) -> tuple[LayerPlan, ...]:
        """The trunk's layers. Layer i is MLA iff it ends a group or lies in the incomplete last group."""
        return tuple(self._plan(index) for index in range(self.num_layers))

    @property
    def n_expert_layers(self) -> int:
        """Trunk layers that route."""
        return sum(plan.mlp == "moe" for plan in self.trunk_plan())

    def mtp_plan(self) -> LayerPlan:
        """The MTP layer: always MLA; its MLP follows the same dense/MoE rule at index num_layers."""
        if self.num_mtp_layers == 0:
            raise ValueError("this architecture has no MTP layer (num_nextn_predict_layers = 0)")
        return self._plan(self.num_layers)

    def _plan(self, index: int) -> LayerPlan:
        group, n_layers = self.layer_group_size, self.num_layers
        is_mla = index >= n_layers or (index + 1) % group == 0 or index >= n_layers // group * group
        is_moe = self.num_experts is not None and index >= self.first_k_dense
        return LayerPlan(
            index=index,
            mixer="mla" if is_mla else "kda",
            mlp="moe" if is_moe else "dense",
            swiglu_limit=_at(self.swiglu_limits, index) if is_moe else None,
            shared_swiglu_limit=_at(self.shared_swiglu_limits, index) if is_moe else None,
            is_mtp=index >= n_layers,
        )

    @staticmethod
    def from_hf(config: Mapping[str, Any], source: str, strict: bool = False) -> Architecture:
        """Read the sizes from HF keys.

        `source` names the file or config key in errors. `strict` refuses unknown keys (for presets;
        a checkpoint's config may carry keys that mean nothing here).
        Raises UnsupportedArchitecture for a missing key, a wrong type, or a variant not computed here.
        """
        reader = HfConfigReader(config, source)
        reader.require_architecture(HF_ARCHITECTURE)
        reader.refuse_unsupported()
        if strict:
            reader.refuse_unknown()
        sizes = _trunk_sizes(reader) | _attention_sizes(reader) | _mlp_sizes(reader)
        architecture = Architecture(**sizes, hf_config=dict(config))
        _check_sizes(architecture, source)
        return architecture


def _at(limits: tuple[float | None, ...], index: int) -> float | None:
    return limits[index] if index < len(limits) else None


def _trunk_sizes(reader: HfConfigReader) -> dict[str, Any]:
    n_heads, hidden = reader.integer("num_attention_heads"), reader.integer("hidden_size")
    return {
        "vocab_size": reader.integer("vocab_size"),
        "hidden_size": hidden,
        "num_layers": reader.integer("num_hidden_layers"),
        "num_mtp_layers": reader.integer("num_nextn_predict_layers", 0, minimum=0),
        "layer_group_size": reader.integer("layer_group_size", 1),
        "first_k_dense": reader.integer("first_k_dense_replace", 0, minimum=0),
        "num_heads": n_heads,
        "max_positions": reader.integer("max_position_embeddings", 4096),
        "rms_norm_eps": reader.number("rms_norm_eps", 1e-6),
        "tie_embeddings": reader.boolean("tie_word_embeddings", False),
        "kda_head_dim": reader.integer("head_dim", hidden // n_heads),
    }


def _attention_sizes(reader: HfConfigReader) -> dict[str, Any]:
    head_dim = reader.integer("head_dim", reader.integer("hidden_size") // reader.integer("num_attention_heads"))
    safe_gate = reader.boolean("kda_safe_gate", False)
    lower_bound = reader.number("kda_lower_bound", None)
    if safe_gate and (lower_bound is None or lower_bound >= 0):
        reader.fail("kda_lower_bound", lower_bound, "a negative number, since kda_safe_gate is true")
    rope_dim = reader.integer("qk_rope_head_dim", reader.integer("rotary_dim", head_dim))
    if rope_dim % 2:
        reader.fail("qk_rope_head_dim", rope_dim, "an even number")
    return {
        "v_head_dim": reader.integer("v_head_dim", head_dim),
        "conv_kernel": reader.integer("short_conv_kernel_size", 4),
        "kda_lower_bound": lower_bound if safe_gate else None,
        "q_lora_rank": reader.integer("q_lora_rank", None),
        "kv_lora_rank": reader.integer("kv_lora_rank"),
        "qk_nope_head_dim": reader.integer("qk_nope_head_dim", head_dim),
        "qk_rope_head_dim": rope_dim,
        "rope_theta": reader.rope_theta(),
    }


def _mlp_sizes(reader: HfConfigReader) -> dict[str, Any]:
    intermediate = reader.integer("intermediate_size")
    moe_width = reader.integer("moe_intermediate_size", intermediate)
    num_shared = reader.integer("num_shared_experts", 0, minimum=0) or 0
    shared_width = reader.integer("moe_shared_expert_intermediate_size", moe_width)
    num_experts = reader.integer("num_experts", None)
    return {
        "intermediate_size": intermediate,
        "moe_intermediate_size": moe_width,
        "num_experts": num_experts,
        "experts_per_token": reader.integer("num_experts_per_tok", 1),
        "num_groups": reader.integer("n_group", 1),
        "groups_per_token": reader.integer("topk_group", 1),
        "routed_scaling_factor": reader.number("routed_scaling_factor", 1.0),
        "shared_intermediate_size": shared_width * num_shared if num_experts and num_shared else None,
        "swiglu_limits": reader.limits("expert_swiglu_limit_list"),
        "shared_swiglu_limits": reader.limits("share_expert_swiglu_limit_list"),
    }


def _check_sizes(arch: Architecture, source: str) -> None:
    def need(ok: bool, message: str) -> None:
        if not ok:
            raise UnsupportedArchitecture(f"{source}: {message}")

    need(arch.num_mtp_layers <= 1, f"num_nextn_predict_layers: {arch.num_mtp_layers} is not supported; allowed: 0, 1")
    if arch.num_experts is None:
        return
    experts, groups = arch.num_experts, arch.num_groups
    need(experts % groups == 0, f"num_experts: {experts} must be a multiple of n_group = {groups}")
    need(groups == 1 or experts // groups >= 2, f"n_group: {groups} leaves fewer than 2 experts in a group")
    need(arch.groups_per_token <= groups, f"topk_group: {arch.groups_per_token} must be at most n_group = {groups}")
    reachable = experts // groups * arch.groups_per_token
    need(
        arch.experts_per_token <= reachable,
        f"num_experts_per_tok: {arch.experts_per_token} exceeds the {reachable} experts of topk_group groups",
    )
