"""Loading: values land where the model expects them, whole and in shards; bad ones are refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from bailing_mtp.contracts.architecture import Architecture, UnsupportedArchitecture
from bailing_mtp.weights.load import CheckpointError, load_hf, read_architecture
from bailing_mtp.weights.names import ParamMap, Shard, mtp_map, trunk_map
from tests.weights.stand_in import FIXTURES, WHOLE, build, state, tiny_config, write_checkpoint, write_tensors


def load(
    directory: Path, shard: Shard = WHOLE, dtype: torch.dtype = torch.bfloat16
) -> tuple[nn.Module, nn.Module]:
    arch = read_architecture(directory)
    trunk, mtp = build(arch, shard, dtype)
    load_hf(directory, arch, shard, trunk, mtp)
    return trunk, mtp


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    return tmp_path / "hf", write_checkpoint(tmp_path / "hf", tiny_config())


def test_fused_parameters_hold_the_fixtures_values() -> None:
    hf = load_file(str(FIXTURES / "moe" / "model.safetensors"))
    trunk, mtp = (state(module) for module in load(FIXTURES / "moe"))
    kda, at = "model.layers.1.attention.", "decoder.layers.1.self_attention."
    rows = [hf[f"{kda}{name}_proj.weight"] for name in "qkvfgb"]
    assert torch.equal(trunk[at + "in_proj.weight"], torch.cat(rows))
    assert torch.equal(
        trunk[at + "conv_weight"], torch.cat([hf[f"{kda}{n}_conv1d.weight"][:, 0] for n in "qkv"])
    )
    assert torch.equal(trunk[at + "out_proj.weight"], hf[kda + "o_proj.weight"])
    mla = "model.layers.4.attention."
    assert torch.equal(trunk["decoder.layers.4.self_attention.gate_proj.weight"], hf[mla + "g_proj.weight"])
    assert torch.equal(trunk["decoder.layers.4.self_attention.out_proj.weight"], hf[mla + "dense.weight"])
    moe = "model.layers.5.mlp."
    for expert in range(16):
        gate, up, down = (hf[f"{moe}experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        assert torch.equal(mtp["block.mlp.experts.gate_up"][expert], torch.cat([gate, up]))
        assert torch.equal(mtp["block.mlp.experts.down"][expert], down)
    assert torch.equal(mtp["block.mlp.router.expert_bias"], hf[moe + "gate.expert_bias"])
    assert torch.equal(mtp["eh_proj.weight"], hf["model.layers.5.eh_proj.weight"])
    assert torch.equal(trunk["decoder.final_layernorm.weight"], hf["model.norm.weight"])
    dense = [hf[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(trunk["decoder.layers.0.mlp.gate_up.weight"], torch.cat(dense))
    shared = [hf[f"model.layers.2.mlp.shared_experts.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(trunk["decoder.layers.2.mlp.shared_experts.gate_up.weight"], torch.cat(shared))
    post = "model.layers.0.post_attention_layernorm.weight"
    assert torch.equal(trunk["decoder.layers.0.pre_mlp_layernorm.weight"], hf[post])


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (1, 2), (2, 2)])
def test_shards_reassemble_to_the_whole(kind: str, tp: int, ep: int) -> None:
    arch = read_architecture(FIXTURES / kind)
    shards = [Shard(tp, t, ep, e) for t in range(tp) for e in range(ep)]
    parts = {shard: load(FIXTURES / kind, shard) for shard in shards}
    for index, maps_of in enumerate((trunk_map, mtp_map)):
        whole = state(load(FIXTURES / kind)[index])
        tables = {shard: maps_of(arch, shard) for shard in shards}
        local = {shard: state(parts[shard][index]) for shard in shards}
        for name, tensor in whole.items():
            split = tables[shards[0]][name].split
            for shard in shards:
                assert torch.equal(
                    local[shard][name], _expected(tensor, tables[shard][name], split, shard)
                ), name


def _expected(whole: Tensor, param: ParamMap, split: str, shard: Shard) -> Tensor:
    """This rank's part, cut from the whole parameter by hand: by section, then by block."""
    if split == "none":
        return whole
    if split == "ep":
        return whole.chunk(shard.ep)[shard.ep_rank]
    if param.pieces[0].held.dim == 1:
        return whole.chunk(shard.tp, dim=1)[shard.tp_rank]
    sections = whole.split([piece.hf_shape[0] for piece in param.pieces])
    return torch.cat([section.chunk(shard.tp)[shard.tp_rank] for section in sections])


def test_only_this_ranks_bytes_are_read(tiny: tuple[Path, dict[str, Tensor]]) -> None:
    directory, hf = tiny
    arch = read_architecture(directory)
    report = load_hf(directory, arch, Shard(), *build(arch))
    assert report.read_bytes == sum(t.numel() * t.element_size() for t in hf.values())
    assert report.n_tensors == len(hf) and report.passed_through == ()
    part = load_hf(directory, arch, Shard(ep=4, ep_rank=1), *build(arch, Shard(ep=4, ep_rank=1)))
    experts = sum(t.numel() * 2 for name, t in hf.items() if ".mlp.experts." in name)
    assert part.read_bytes == report.read_bytes - experts * 3 // 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp32_values_never_pass_through_bf16(
    tiny: tuple[Path, dict[str, Tensor]], dtype: torch.dtype
) -> None:
    directory, hf = tiny
    trunk, mtp = (state(module) for module in load(directory, dtype=dtype))
    bias = hf["model.layers.3.mlp.gate.expert_bias"]
    assert not torch.equal(bias, bias.bfloat16().float())
    assert torch.equal(mtp["block.mlp.router.expert_bias"], bias)
    assert torch.equal(trunk["decoder.layers.1.self_attention.A_log"], hf["model.layers.1.attention.A_log"])
    assert torch.equal(
        trunk["decoder.layers.1.self_attention.dt_bias"], hf["model.layers.1.attention.dt_bias"]
    )
    assert trunk["embedding.weight"].dtype == dtype


def test_fp32_source_is_rounded_once_into_bf16(tmp_path: Path) -> None:
    hf = write_checkpoint(tmp_path, tiny_config(), fp32=("",))
    trunk, _ = load(tmp_path)
    assert torch.equal(state(trunk)["embedding.weight"], hf["model.word_embeddings.weight"].bfloat16())


@pytest.mark.parametrize(
    "changes", [{"q_lora_rank": None}, {"tie_word_embeddings": True}, {"num_shared_experts": 0}]
)
def test_variants_load(tmp_path: Path, changes: dict[str, object]) -> None:
    hf = write_checkpoint(tmp_path, tiny_config(**changes))
    trunk, mtp = (state(module) for module in load(tmp_path, Shard(2, 1)))
    for tensor in (*trunk.values(), *mtp.values()):
        assert not tensor.isnan().any()
    if "q_lora_rank" in changes:
        q_rows = hf["model.layers.3.attention.q_proj.weight"][16:]
        assert torch.equal(mtp["block.self_attention.q_proj.weight"], q_rows)
    assert ("head.weight" in trunk) != ("tie_word_embeddings" in changes)


def test_mtp_off_reports_what_is_passed_through(tiny: tuple[Path, dict[str, Tensor]]) -> None:
    directory, hf = tiny
    arch = read_architecture(directory)
    trunk, _ = build(arch)
    report = load_hf(directory, arch, Shard(), trunk, None)
    assert sorted(report.passed_through) == sorted(name for name in hf if name.startswith("model.layers.3."))
    assert report.source_dtypes["model.layers.3.mlp.gate.expert_bias"] == torch.float32
    assert report.mtp_loss_scaling_factor is None


def test_loss_scaling_factor_is_reported(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config(mtp_loss_scaling_factor=0.3))
    arch = read_architecture(tmp_path)
    assert load_hf(tmp_path, arch, Shard(), *build(arch)).mtp_loss_scaling_factor == 0.3


def refused(directory: Path, match: str, with_mtp: bool = True) -> None:
    """The load is refused with this message, and nothing was written."""
    arch = read_architecture(directory)
    trunk, mtp = (
        build(arch) if arch.num_mtp_layers else (build(Architecture.from_hf(tiny_config(), "t"))[0], None)
    )
    with pytest.raises(CheckpointError, match=match):
        load_hf(directory, arch, Shard(), trunk, mtp if with_mtp else None)
    assert all(parameter.isnan().all() for parameter in trunk.parameters())


def test_missing_extra_and_misshapen_are_listed_together(tiny: tuple[Path, dict[str, Tensor]]) -> None:
    directory, hf = tiny
    del hf["model.norm.weight"]
    hf["model.layers.1.attention.bogus.weight"] = torch.zeros(2)
    hf["lm_head.weight"] = torch.zeros(3, 12)
    write_tensors(directory, tiny_config(), hf)
    refused(
        directory,
        r"(?s)1 missing:\n  model\.norm\.weight\n"
        r"1 not in this model:\n  model\.layers\.1\.attention\.bogus\.weight\n"
        r"1 unusable:\n  lm_head\.weight: \[3, 12\], expected \[24, 12\]",
    )


def test_long_lists_are_cut_after_ten(tiny: tuple[Path, dict[str, Tensor]]) -> None:
    directory, hf = tiny
    kept = {
        name: tensor
        for name, tensor in hf.items()
        if ".experts." not in name or name.startswith("model.layers.3")
    }
    write_tensors(directory, tiny_config(), kept)
    refused(directory, r"(?s)48 missing:\n(  model\S+\n){10}  \.\.\. and 38 more$")


def test_missing_expert_bias_is_an_error(tiny: tuple[Path, dict[str, Tensor]]) -> None:
    directory, hf = tiny
    del hf["model.layers.1.mlp.gate.expert_bias"]
    write_tensors(directory, tiny_config(), hf)
    refused(directory, r"model\.layers\.1\.mlp\.gate\.expert_bias")


def test_mtp_asked_for_but_absent_or_incomplete(tiny: tuple[Path, dict[str, Tensor]]) -> None:
    directory, hf = tiny
    without_one = {name: tensor for name, tensor in hf.items() if name != "model.layers.3.eh_proj.weight"}
    write_tensors(directory, tiny_config(), without_one)
    refused(directory, r"1 missing \(MTP layer\):\n  model\.layers\.3\.eh_proj\.weight")
    refused(directory, r"1 missing \(MTP layer\)", with_mtp=False)
    trunk_only = {name: tensor for name, tensor in hf.items() if not name.startswith("model.layers.3.")}
    write_tensors(directory, tiny_config(), trunk_only)
    refused(directory, r"missing \(MTP layer\)")
    arch = read_architecture(directory)
    assert load_hf(directory, arch, Shard(), build(arch)[0], None).passed_through == ()


def test_mtp_tensors_of_a_config_without_mtp_are_refused(tiny: tuple[Path, dict[str, Tensor]]) -> None:
    directory, hf = tiny
    write_tensors(directory, tiny_config(num_nextn_predict_layers=0), hf)
    refused(directory, "num_nextn_predict_layers is 0", with_mtp=False)


def test_several_mtp_layers_are_refused(tiny: tuple[Path, dict[str, Tensor]]) -> None:
    directory, hf = tiny
    write_tensors(directory, tiny_config(num_nextn_predict_layers=2), hf)
    with pytest.raises(UnsupportedArchitecture, match="num_nextn_predict_layers: 2"):
        read_architecture(directory)


def test_quantised_tensors_are_refused(tiny: tuple[Path, dict[str, Tensor]]) -> None:
    directory, hf = tiny
    hf["lm_head.weight"] = hf["lm_head.weight"].to(torch.float8_e4m3fn)
    write_tensors(directory, tiny_config(), hf)
    refused(directory, r"lm_head\.weight: F8_E4M3, allowed: BF16, F16, F32")


def test_a_module_that_the_table_does_not_describe_is_refused(tiny: tuple[Path, dict[str, Tensor]]) -> None:
    directory, _ = tiny
    arch = read_architecture(directory)
    trunk, mtp = build(arch)
    mtp.register_parameter("stray", nn.Parameter(torch.zeros(1)))
    with pytest.raises(RuntimeError, match="stray"):
        load_hf(directory, arch, Shard(), trunk, mtp)
    trunk, mtp = build(arch)
    with pytest.raises(RuntimeError, match="must stay torch.float32"):
        load_hf(directory, arch, Shard(), trunk.bfloat16(), mtp)
