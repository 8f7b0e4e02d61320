"""Typed reading of a Hugging Face config.json: aliases, defaults, and refusals by name.

Source: Bailing V3 spec section 1 (fields, aliases, and what the published modeling code computes).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from bailing_mtp.errors import UserError

ALIASES: dict[str, tuple[str, ...]] = {
    "num_experts": ("n_routed_experts",),
    "num_experts_per_tok": ("moe_router_topk",),
    "n_group": ("moe_router_num_groups",),
    "topk_group": ("moe_router_group_topk",),
    "routed_scaling_factor": ("moe_router_topk_scaling_factor",),
    "score_function": ("scoring_func",),
    "router_dtype": ("moe_router_dtype",),
    "torch_dtype": ("dtype",),
}

# Key -> values that mean "as computed here". A missing key is fine unless it stands in REQUIRED.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "score_function": ("sigmoid",),
    "moe_router_enable_expert_bias": (True,),
    "norm_topk_prob": (True,),
    "topk_method": ("noaux_tc", "group_limited_greedy"),
    "router_dtype": ("fp32", "float32"),
    "gated_attention_proj_granularity_type": ("head_wise",),
    "no_kda_lora": (True,),
    "hidden_act": ("silu",),
    "rope_interleave": (True,),
    "rope_scaling": (None,),
    "mtp_use_kda": (False, None),
    "use_mla_nope": (False, None),
    "scale_router_input": (False, None),
    "value_norm": (False, None),
    "up_proj_norm": (False, None),
    "use_nGPT": (False, None),
    "group_norm_size": (1, None),
    "use_bias": (False, None),
    "use_qkv_bias": (False, None),
    "attention_bias": (False, None),
}
REQUIRED = ("gated_attention_proj_granularity_type", "no_kda_lora", "kv_lora_rank")

# Read here, or known to mean nothing for the computation.
KNOWN = (
    *ALIASES, *(alias for names in ALIASES.values() for alias in names), *SUPPORTED,
    "architectures", "model_type", "auto_map", "vocab_size", "hidden_size", "num_hidden_layers",
    "num_nextn_predict_layers", "mtp_loss_scaling_factor", "layer_group_size", "first_k_dense_replace",
    "num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "rotary_dim", "partial_rotary_factor", "rope_theta",
    "rope_parameters", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "intermediate_size",
    "moe_intermediate_size", "num_shared_experts", "moe_shared_expert_intermediate_size",
    "moe_router_bias_update_rate", "short_conv_kernel_size", "kda_safe_gate", "kda_lower_bound", "use_qk_norm",
    "linear_silu", "num_kv_heads_for_linear_attn", "seq_aux", "max_window_layers", "expert_swiglu_limit_list",
    "share_expert_swiglu_limit_list", "eos_token_id", "pad_token_id", "bos_token_id", "sequence_parallel",
    "initializer_range", "use_cache", "output_router_logits", "transformers_version", "attention_dropout",
    "embedding_dropout", "output_dropout", "use_sliding_window", "sliding_window", "router_aux_loss_coef",
)  # fmt: skip

_MISSING = object()


class UnsupportedArchitecture(UserError):
    """A config that lacks something, has a wrong type, or asks for a variant not computed here."""


class HfConfigReader:
    """Reads typed values of one config; every error names the source, the key, the value and what is allowed."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self._config = config
        self._source = source

    def fail(self, key: str, value: Any, allowed: str) -> NoReturn:
        raise UnsupportedArchitecture(f"{self._source}: {key}: {value!r} is not supported; allowed: {allowed}")

    def get(self, key: str, default: Any = _MISSING) -> Any:
        """The value under `key` or one of its aliases; two spellings that disagree are an error."""
        names = (key, *ALIASES.get(key, ()))
        found = {name: self._config[name] for name in names if self._config.get(name) is not None}
        if len({repr(value) for value in found.values()}) > 1:
            raise UnsupportedArchitecture(f"{self._source}: {found} are spellings of one value and disagree")
        if found:
            return next(iter(found.values()))
        if default is _MISSING:
            raise UnsupportedArchitecture(f"{self._source}: {key} is missing")
        return default

    def integer(self, key: str, default: Any = _MISSING, minimum: int = 1) -> Any:
        value = self.get(key, default)
        if value is None and default is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            self.fail(key, value, f"an integer >= {minimum}")
        return value

    def number(self, key: str, default: Any = _MISSING) -> Any:
        value = self.get(key, default)
        if value is None and default is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.fail(key, value, "a finite number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            self.fail(key, value, "true, false")
        return value

    def rope_theta(self) -> float:
        """Both spellings: rope_theta, and rope_parameters.rope_theta of newer files; required."""
        nested = self._config.get("rope_parameters") or {}
        if nested.get("rope_type", "default") != "default":
            self.fail("rope_parameters.rope_type", nested["rope_type"], "default")
        values = {v for v in (self._config.get("rope_theta"), nested.get("rope_theta")) if v is not None}
        if len(values) > 1:
            raise UnsupportedArchitecture(
                f"{self._source}: rope_theta and rope_parameters.rope_theta disagree: {sorted(values)}"
            )
        if not values:
            raise UnsupportedArchitecture(f"{self._source}: rope_theta (or rope_parameters.rope_theta) is missing")
        theta = values.pop()
        if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
            self.fail("rope_theta", theta, "a positive number")
        return float(theta)

    def limits(self, key: str) -> tuple[float | None, ...]:
        """Per-layer SwiGLU limits; 0 and null mean no limit."""
        values = self.get(key, None)
        if values is None:
            return ()
        n_layers = self.integer("num_hidden_layers")
        if not isinstance(values, list | tuple) or len(values) < n_layers:
            self.fail(key, values, f"a list with at least {n_layers} entries, one a layer")
        return tuple(float(v) if v is not None and v > 0 else None for v in values)

    def require_architecture(self, name: str) -> None:
        names = self._config.get("architectures") or []
        if name not in names:
            raise UnsupportedArchitecture(
                f"{self._source}: architectures: {names} is not supported; it must contain '{name}' "
                "(model_type alone is ambiguous between generations)"
            )

    def refuse_unsupported(self) -> None:
        for key in REQUIRED:
            self.get(key)
        for key, allowed in SUPPORTED.items():
            value = self.get(key, _MISSING) if self._present(key) else _MISSING
            if value is not _MISSING and value not in allowed:
                self.fail(key, value, ", ".join(str(v) for v in allowed if v is not None))
        n_heads = self.integer("num_attention_heads")
        for key in ("num_key_value_heads", "num_kv_heads_for_linear_attn"):
            value = self.integer(key, n_heads, minimum=0)
            if value not in (0, n_heads) or (value == 0 and key == "num_key_value_heads"):
                self.fail(key, value, f"num_attention_heads = {n_heads}")

    def refuse_unknown(self) -> None:
        for key in self._config:
            if key not in KNOWN:
                close = difflib.get_close_matches(key, KNOWN, n=1)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise UnsupportedArchitecture(f"{self._source}: unknown key {key}{hint}")

    def _present(self, key: str) -> bool:
        return any(self._config.get(name) is not None for name in (key, *ALIASES.get(key, ())))
