"""Which part of which Hugging Face tensor each local parameter holds (Bailing V3 spec section 4).

A pure table: no tensors, no files. Row-split and column-split tensors are contiguous blocks by
tensor-parallel rank, experts are whole and contiguous by expert-parallel rank, the rest is replicated.
Parameters that fuse several HF tensors stack this rank's block of each, in the order listed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from bailing_mtp.contracts.architecture import Architecture, LayerPlan
from bailing_mtp.errors import UserError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """Which part of the model a rank holds: tensor-parallel and expert-parallel size and rank."""

    tp: int = 1
    tp_rank: int = 0
    ep: int = 1
    ep_rank: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.tp_rank < self.tp and 0 <= self.ep_rank < self.ep, self


class Slice(NamedTuple):
    """Indices start..stop-1 of dimension `dim`."""

    dim: int
    start: int
    stop: int


class Piece(NamedTuple):
    """One HF tensor's part of a local parameter."""

    hf_name: str
    hf_shape: Shape
    """Shape of the whole HF tensor."""
    held: Slice
    """The part of the HF tensor that this rank holds."""
    lands: tuple[Slice, ...]
    """Where it lies in the local parameter: same elements, same order, up to dimensions of size 1."""

    @property
    def held_shape(self) -> Shape:
        dim, start, stop = self.held
        return (*self.hf_shape[:dim], stop - start, *self.hf_shape[dim + 1 :])


@dataclass(frozen=True)
class ParamMap:
    """A local parameter (or buffer): its local shape and the HF pieces that fill it."""

    shape: Shape
    pieces: tuple[Piece, ...]
    split: Literal["tp", "ep", "none"]
    """Over which ranks the HF tensors are spread: cut by tp, whole on one ep rank each, or replicated."""
    keep_fp32: bool = False
    """The parameter is fp32 whatever the model's dtype."""
    is_buffer: bool = False


ParamMaps = dict[str, ParamMap]


def trunk_map(arch: Architecture, shard: Shard) -> ParamMaps:
    """Local parameter names of the trunk -> HF pieces.

    Raises UserError when the sizes do not divide by the shard's tp or ep.
    """
    check_divisible(arch, shard)
    vocab_shape = (arch.vocab_size, arch.hidden_size)
    maps = {"embedding.weight": _rows([("model.word_embeddings.weight", vocab_shape)], shard)}
    for plan in arch.trunk_plan():
        maps |= _prefixed(f"decoder.layers.{plan.index}.", _layer(arch, plan, shard))
    maps["decoder.final_layernorm.weight"] = _whole("model.norm.weight", (arch.hidden_size,))
    if not arch.tie_embeddings:
        maps["head.weight"] = _rows([("lm_head.weight", vocab_shape)], shard)
    return maps


def mtp_map(arch: Architecture, shard: Shard) -> ParamMaps:
    """Local parameter names of the MTP layer -> HF pieces (HF layer index num_hidden_layers).

    Raises ValueError when the architecture has no MTP layer, UserError when sizes do not divide by tp or ep.
    """
    check_divisible(arch, shard)
    hidden, prefix = arch.hidden_size, mtp_prefix(arch)
    maps = {
        "enorm.weight": _whole(prefix + "enorm.weight", (hidden,)),
        "hnorm.weight": _whole(prefix + "hnorm.weight", (hidden,)),
        "eh_proj.weight": _whole(prefix + "eh_proj.weight", (hidden, 2 * hidden)),
    }
    maps |= _prefixed("block.", _layer(arch, arch.mtp_plan(), shard))
    maps["final_layernorm.weight"] = _whole(prefix + "final_layernorm.weight", (hidden,))
    return maps


def mtp_prefix(arch: Architecture) -> str:
    """What every HF tensor name of the MTP layer begins with."""
    return f"model.layers.{arch.num_layers}."


def trunk_hf_shapes(arch: Architecture) -> dict[str, Shape]:
    """HF names of the whole trunk -> shapes."""
    return _hf_shapes(trunk_map(arch, Shard()))


def mtp_hf_shapes(arch: Architecture) -> dict[str, Shape]:
    """HF names of the whole MTP layer -> shapes. Raises ValueError when the architecture has none."""
    return _hf_shapes(mtp_map(arch, Shard()))


def check_divisible(arch: Architecture, shard: Shard) -> None:
    """Raises UserError naming the sizes that tp or ep does not divide."""
    plans = [*arch.trunk_plan(), *([arch.mtp_plan()] if arch.num_mtp_layers else [])]
    has_moe = any(plan.mlp == "moe" for plan in plans)
    by_tp = {"vocab_size": arch.vocab_size, "num_attention_heads": arch.num_heads}
    if any(plan.mlp == "dense" for plan in plans):
        by_tp["intermediate_size"] = arch.intermediate_size
    if has_moe and arch.shared_intermediate_size is not None:
        by_tp["shared expert width"] = arch.shared_intermediate_size
    bad = [f"{name} = {size} by tp = {shard.tp}" for name, size in by_tp.items() if size % shard.tp]
    if has_moe and _experts(arch) % shard.ep:
        bad.append(f"num_experts = {arch.num_experts} by ep = {shard.ep}")
    if bad:
        raise UserError("the model cannot be divided: " + "; ".join(bad))


def _layer(arch: Architecture, plan: LayerPlan, shard: Shard) -> ParamMaps:
    hf, hidden = f"model.layers.{plan.index}.", arch.hidden_size
    mixer = _kda if plan.mixer == "kda" else _mla
    mlp = _moe if plan.mlp == "moe" else _dense_mlp
    maps = {"input_layernorm.weight": _whole(hf + "input_layernorm.weight", (hidden,))}
    maps |= _prefixed("self_attention.", mixer(arch, hf + "attention.", shard))
    maps["pre_mlp_layernorm.weight"] = _whole(hf + "post_attention_layernorm.weight", (hidden,))
    return maps | _prefixed("mlp.", mlp(arch, hf + "mlp.", shard))


def _kda(arch: Architecture, hf: str, shard: Shard) -> ParamMaps:
    """Spec section 2.1. Fused: q|k|v|f|g|b rows of this rank's heads, and q|k|v convolution channels."""
    hidden, n_heads, d_v = arch.hidden_size, arch.num_heads, arch.v_head_dim
    rows = dict(zip("qkvfgb", arch.kda_in_rows, strict=True))
    in_proj = [(f"{hf}{name}_proj.weight", (n_rows, hidden)) for name, n_rows in rows.items()]
    conv = [(f"{hf}{name}_conv1d.weight", (rows[name], 1, arch.conv_kernel)) for name in "qkv"]
    return {
        "in_proj.weight": _rows(in_proj, shard),
        "conv_weight": _rows(conv, shard, local_tail=(arch.conv_kernel,)),
        "A_log": _rows([(hf + "A_log", (n_heads,))], shard, keep_fp32=True),
        "dt_bias": _rows([(hf + "dt_bias", (rows["f"],))], shard, keep_fp32=True),
        "o_norm.weight": _whole(hf + "o_norm.weight", (d_v,)),
        "out_proj.weight": _columns(hf + "o_proj.weight", (hidden, n_heads * d_v), shard),
    }


def _mla(arch: Architecture, hf: str, shard: Shard) -> ParamMaps:
    """Spec section 2.2, with low-rank or direct queries."""
    hidden, n_heads, d_v = arch.hidden_size, arch.num_heads, arch.v_head_dim
    q_rows, kv_rank, q_rank = n_heads * arch.qk_head_dim, arch.kv_lora_rank, arch.q_lora_rank
    if q_rank is None:
        maps = {"q_proj.weight": _rows([(hf + "q_proj.weight", (q_rows, hidden))], shard)}
    else:
        maps = {
            "q_a_proj.weight": _whole(hf + "q_a_proj.weight", (q_rank, hidden)),
            "q_a_layernorm.weight": _whole(hf + "q_a_layernorm.weight", (q_rank,)),
            "q_b_proj.weight": _rows([(hf + "q_b_proj.weight", (q_rows, q_rank))], shard),
        }
    kv_a_rows, kv_b_rows = kv_rank + arch.qk_rope_head_dim, n_heads * (arch.qk_nope_head_dim + d_v)
    return maps | {
        "kv_a_proj.weight": _whole(hf + "kv_a_proj_with_mqa.weight", (kv_a_rows, hidden)),
        "kv_a_layernorm.weight": _whole(hf + "kv_a_layernorm.weight", (kv_rank,)),
        "kv_b_proj.weight": _rows([(hf + "kv_b_proj.weight", (kv_b_rows, kv_rank))], shard),
        "gate_proj.weight": _rows([(hf + "g_proj.weight", (n_heads, hidden))], shard),
        "out_proj.weight": _columns(hf + "dense.weight", (hidden, n_heads * d_v), shard),
    }


def _dense_mlp(arch: Architecture, hf: str, shard: Shard) -> ParamMaps:
    return _swiglu(hf, arch.hidden_size, arch.intermediate_size, shard)


def _swiglu(hf: str, hidden: int, width: int, shard: Shard) -> ParamMaps:
    gate_up = [(f"{hf}{name}_proj.weight", (width, hidden)) for name in ("gate", "up")]
    return {
        "gate_up.weight": _rows(gate_up, shard),
        "down.weight": _columns(hf + "down_proj.weight", (hidden, width), shard),
    }


def _moe(arch: Architecture, hf: str, shard: Shard) -> ParamMaps:
    """Spec section 2.3. Experts stay whole: [e, gate rows then up rows, H] and [e, H, F]."""
    hidden, width, n_experts = arch.hidden_size, arch.moe_intermediate_size, _experts(arch)
    n_local = n_experts // shard.ep
    gate_up, down = [], []
    for local in range(n_local):
        expert = f"{hf}experts.{shard.ep_rank * n_local + local}."
        at = Slice(0, local, local + 1)
        for half, name in enumerate(("gate", "up")):
            lands = (at, Slice(1, half * width, (half + 1) * width))
            gate_up.append(_whole_piece(f"{expert}{name}_proj.weight", (width, hidden), lands))
        down.append(_whole_piece(expert + "down_proj.weight", (hidden, width), (at,)))
    maps = {
        "router.weight": _whole(hf + "gate.weight", (n_experts, hidden)),
        "router.expert_bias": _whole(hf + "gate.expert_bias", (n_experts,), keep_fp32=True, is_buffer=True),
        "experts.gate_up": ParamMap((n_local, 2 * width, hidden), tuple(gate_up), "ep"),
        "experts.down": ParamMap((n_local, hidden, width), tuple(down), "ep"),
    }
    if arch.shared_intermediate_size is not None:
        shared = _swiglu(hf + "shared_experts.", hidden, arch.shared_intermediate_size, shard)
        maps |= _prefixed("shared_experts.", shared)
    return maps


def _rows(
    sections: Sequence[tuple[str, Shape]],
    shard: Shard,
    local_tail: Shape | None = None,
    keep_fp32: bool = False,
) -> ParamMap:
    """This rank's rows (dimension 0) of each HF tensor, stacked; `local_tail`: local shape after them."""
    pieces, end = [], 0
    for hf_name, hf_shape in sections:
        n_rows = hf_shape[0] // shard.tp
        held = Slice(0, shard.tp_rank * n_rows, (shard.tp_rank + 1) * n_rows)
        pieces.append(Piece(hf_name, hf_shape, held, (Slice(0, end, end + n_rows),)))
        end += n_rows
    tail = sections[0][1][1:] if local_tail is None else local_tail
    return ParamMap((end, *tail), tuple(pieces), "tp", keep_fp32)


def _columns(hf_name: str, hf_shape: Shape, shard: Shard) -> ParamMap:
    n_rows, n_columns = hf_shape[0], hf_shape[1] // shard.tp
    held = Slice(1, shard.tp_rank * n_columns, (shard.tp_rank + 1) * n_columns)
    return ParamMap((n_rows, n_columns), (Piece(hf_name, hf_shape, held, ()),), "tp")


def _whole(hf_name: str, hf_shape: Shape, keep_fp32: bool = False, is_buffer: bool = False) -> ParamMap:
    return ParamMap(hf_shape, (_whole_piece(hf_name, hf_shape, ()),), "none", keep_fp32, is_buffer)


def _whole_piece(hf_name: str, hf_shape: Shape, lands: tuple[Slice, ...]) -> Piece:
    return Piece(hf_name, hf_shape, Slice(0, 0, hf_shape[0]), lands)


def _prefixed(prefix: str, maps: ParamMaps) -> ParamMaps:
    return {prefix + name: param for name, param in maps.items()}


def _hf_shapes(maps: ParamMaps) -> dict[str, Shape]:
    return {piece.hf_name: piece.hf_shape for piece in _pieces(maps.values())}


def _pieces(maps: Iterable[ParamMap]) -> Iterable[Piece]:
    return (piece for param in maps for piece in param.pieces)


def _experts(arch: Architecture) -> int:
    assert arch.num_experts is not None
    return arch.num_experts
