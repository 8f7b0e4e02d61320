"""The name table: against the fixtures' headers; shards tile the whole without gap or overlap."""

import math

import pytest
import torch

from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.weights.check import check_tensors
from bailing_mtp.weights.checkpoint_files import open_checkpoint, read_architecture
from bailing_mtp.weights.local_tensors import piece_view
from bailing_mtp.weights.names import Shard, mtp_hf_shapes, mtp_map, trunk_hf_shapes, trunk_map
from tests.weights.stand_in import FIXTURES, tiny_config


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_names_and_shapes_are_those_of_the_fixture(kind: str) -> None:
    files = open_checkpoint(FIXTURES / kind)
    arch = read_architecture(FIXTURES / kind)
    expected = trunk_hf_shapes(arch) | mtp_hf_shapes(arch)
    assert {name: stored.shape for name, stored in files.tensors.items()} == expected
    check = check_tensors(files, arch)
    assert check.mtp_complete and not (check.missing or check.extra or check.unusable)


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 8), (2, 4)])
def test_shards_tile_every_hf_tensor_and_every_local_parameter(tp: int, ep: int) -> None:
    arch = Architecture.from_hf(tiny_config(), "test")
    counts = {
        name: torch.zeros(shape) for name, shape in (trunk_hf_shapes(arch) | mtp_hf_shapes(arch)).items()
    }
    replicated = set()
    for tp_rank in range(tp):
        for ep_rank in range(ep):
            shard = Shard(tp, tp_rank, ep, ep_rank)
            for param in (*trunk_map(arch, shard).values(), *mtp_map(arch, shard).values()):
                local = torch.zeros(param.shape)
                for piece in param.pieces:
                    piece_view(local, piece).add_(1)
                    dim, start, stop = piece.held
                    counts[piece.hf_name].narrow(dim, start, stop - start).add_(1)
                    if param.split == "none":
                        replicated.add(piece.hf_name)
                assert (local == 1).all()
    for name, count in counts.items():
        if name in replicated:
            assert (count == tp * ep).all(), name
        else:
            assert (count == (tp if ".experts." in name else ep)).all(), name


def test_kda_in_proj_stacks_this_ranks_block_of_every_section() -> None:
    arch = Architecture.from_hf(tiny_config(), "test")
    param = trunk_map(arch, Shard(2, 1))["decoder.layers.0.self_attention.in_proj.weight"]
    # q k f: 4 heads * 6 = 24 rows, v g: 4 heads * 4 = 16 rows, b: 4 rows; rank 1 of 2 holds the upper half.
    held = [(piece.hf_name.rsplit(".", 2)[-2], piece.held[1:]) for piece in param.pieces]
    assert held == [
        ("q_proj", (12, 24)), ("k_proj", (12, 24)), ("v_proj", (8, 16)),
        ("f_proj", (12, 24)), ("g_proj", (8, 16)), ("b_proj", (2, 4)),
    ]  # fmt: skip
    assert [piece.lands[0][1:] for piece in param.pieces] == [
        (0, 12),
        (12, 24),
        (24, 32),
        (32, 44),
        (44, 52),
        (52, 54),
    ]


def test_direct_queries_and_tied_embeddings_change_the_names() -> None:
    arch = Architecture.from_hf(tiny_config(q_lora_rank=None, tie_word_embeddings=True), "test")
    shapes = trunk_hf_shapes(arch) | mtp_hf_shapes(arch)
    assert shapes["model.layers.2.attention.q_proj.weight"] == (32, 12)
    assert not any("q_a_" in name or "q_b_" in name or "lm_head" in name for name in shapes)
    assert "head.weight" not in trunk_map(arch, Shard())


def test_parameter_counts_of_ling3_tiny_base() -> None:
    """Bailing V3 spec: 7,893,392,800 in the trunk and 316,604,800 in the MTP layer (with expert biases)."""
    sizes = dict(
        vocab_size=157184, hidden_size=1536, num_hidden_layers=24, layer_group_size=4, num_attention_heads=16,
        num_key_value_heads=16, head_dim=128, v_head_dim=128, q_lora_rank=256, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, intermediate_size=4608, moe_intermediate_size=512,
        num_experts=128, num_experts_per_tok=8, n_group=8, topk_group=4,
        num_shared_experts=1, moe_shared_expert_intermediate_size=512,
    )  # fmt: skip
    arch = Architecture.from_hf(tiny_config(**sizes), "test")
    assert sum(math.prod(shape) for shape in trunk_hf_shapes(arch).values()) == 7_893_392_800
    assert sum(math.prod(shape) for shape in mtp_hf_shapes(arch).values()) == 316_604_800


def test_sizes_that_do_not_divide_are_named() -> None:
    arch = Architecture.from_hf(tiny_config(), "test")
    with pytest.raises(ValueError, match="num_attention_heads = 4 by tp = 3.*num_experts = 8 by ep = 3"):
        trunk_map(arch, Shard(3, 0, 3, 0))
