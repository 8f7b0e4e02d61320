"""Architectures for the benchmark's tests."""

from bailing_mtp.config import BenchmarkConfig, build_config
from bailing_mtp.contracts.architecture import Architecture
from recipes.compose import compose


def config_of(*arguments: str) -> BenchmarkConfig:
    """The config of a command line, as the recipe builds it."""
    return build_config(BenchmarkConfig, compose(BenchmarkConfig, "benchmark", list(arguments), run_dir="out"))


def architecture(model: str, **changes: object) -> Architecture:
    """A preset, with some of its HF keys changed."""
    values = config_of("what=kernels", f"model={model}").model.architecture
    return Architecture.from_hf(values | changes, "test", strict=True)


SMALLEST = {
    "num_hidden_layers": 2,
    "layer_group_size": 2,
    "vocab_size": 500,
    "hidden_size": 32,
    "head_dim": 16,
    "v_head_dim": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "rotary_dim": 8,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
}
"""Changes to the preset `tiny`: every kind of mixer and MLP, and head sizes that the kernels take."""


def smallest() -> Architecture:
    return architecture("tiny", **SMALLEST)
