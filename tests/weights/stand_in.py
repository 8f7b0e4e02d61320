"""Stand-in modules with the right parameter names and local shapes, and synthetic checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.weights.names import ParamMaps, Shard, mtp_hf_shapes, mtp_map, trunk_hf_shapes, trunk_map

FIXTURES = Path(__file__).parent.parent / "fixtures" / "bailing_v3"
WHOLE = Shard()


def stand_in(maps: ParamMaps, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """A module that only registers the mapped names, all NaN."""
    root = nn.Module()
    for name, param in maps.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        values = torch.full(param.shape, float("nan"), dtype=torch.float32 if param.keep_fp32 else dtype)
        if param.is_buffer:
            module.register_buffer(leaf, values)
        else:
            module.register_parameter(leaf, nn.Parameter(values))
    return root


def build(
    arch: Architecture, shard: Shard = WHOLE, dtype: torch.dtype = torch.bfloat16
) -> tuple[nn.Module, nn.Module]:
    """Trunk and MTP stand-ins of one rank."""
    return stand_in(trunk_map(arch, shard), dtype), stand_in(mtp_map(arch, shard), dtype)


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach() for name, t in (*module.named_parameters(), *module.named_buffers())}


def stored(directory: Path) -> dict[str, Tensor]:
    """Every tensor of an HF directory, read with the safetensors library alone."""
    tensors = {}
    for file in sorted(directory.glob("model*.safetensors")):
        with safe_open(str(file), framework="pt") as handle:
            tensors |= {name: handle.get_tensor(name) for name in handle.keys()}
    return tensors


def assert_same_bytes(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert sorted(got) == sorted(expected)
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert got[name].shape == tensor.shape, name
        assert torch.equal(_bits(got[name]), _bits(tensor)), name


def tiny_config(**changes: Any) -> dict[str, Any]:
    """A very small MoE config: two KDA layers (dense, MoE), one MLA layer, one MTP layer."""
    return {
        "architectures": ["BailingMoeV3ForCausalLM"], "model_type": "bailing_hybrid",
        "torch_dtype": "bfloat16", "vocab_size": 24, "hidden_size": 12, "num_hidden_layers": 3,
        "num_nextn_predict_layers": 1,
        "layer_group_size": 3, "first_k_dense_replace": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
        "head_dim": 6, "v_head_dim": 4, "q_lora_rank": 5, "kv_lora_rank": 7, "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 2, "rope_theta": 10000, "intermediate_size": 8, "moe_intermediate_size": 3,
        "num_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "num_shared_experts": 2,
        "moe_shared_expert_intermediate_size": 4, "no_kda_lora": True, "tie_word_embeddings": False,
        "gated_attention_proj_granularity_type": "head_wise",
    } | changes  # fmt: skip


def write_checkpoint(
    directory: Path,
    config: dict[str, Any],
    seed: int = 0,
    fp32: tuple[str, ...] = ("A_log", "dt_bias", "expert_bias"),
) -> dict[str, Tensor]:
    """A random HF checkpoint of `config`, in one file; names ending in `fp32` are stored in fp32."""
    arch = Architecture.from_hf(config, "test")
    shapes = trunk_hf_shapes(arch) | (mtp_hf_shapes(arch) if arch.num_mtp_layers else {})
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        tensors[name] = values if name.endswith(fp32) else values.bfloat16()
        if name.endswith("expert_bias"):
            tensors[name] = 0.1 + 1e-5 * torch.randint(1, 99, shape, generator=generator).float()
    write_tensors(directory, config, tensors)
    return tensors


def write_tensors(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, str(directory / "model.safetensors"))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
