"""A model of transformer-engine's layers against the same model of this package's own."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformer_engine.common import recipe
from transformer_engine.pytorch import layers as te_layers
from transformer_engine.pytorch.distributed import RECOMPUTED

from bailing_mtp.errors import UserError
from bailing_mtp.model import te
from bailing_mtp.model.build import BuiltModel, build_model
from bailing_mtp.model.settings import ModelSettings
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.training.scoring import score_batch
from bailing_mtp.training.state import build_state
from bailing_mtp.weights.export import export_hf
from bailing_mtp.weights.fresh import init_fresh
from bailing_mtp.weights.load import load_hf
from bailing_mtp.weights.names import Shard, mtp_map, trunk_map
from bailing_mtp.weights.view import publish, tensors_of
from recipes.model_settings import fp8_note
from tests.distributed import worlds
from tests.model.test_presets import preset
from tests.mtp import models

LOCAL = ModelSettings(torch.float32, torch.float32)
TE = dataclasses.replace(LOCAL, backend="te", experts="grouped")
RECIPES = {
    "tensorwise": (recipe.Float8CurrentScaling, recipe.Format.HYBRID),
    "blockwise": (recipe.Float8BlockScaling, recipe.Format.E4M3),
    "mxfp8": (recipe.MXFP8BlockScaling, recipe.Format.E4M3),
}


@pytest.fixture(scope="module")
def context() -> Iterator[ParallelContext]:
    with worlds.layout(tp=1, ep=1) as context:
        yield context


def _built(context: ParallelContext, settings: ModelSettings, **changes: object) -> BuiltModel:
    # Limits on SwiGLU, so that experts that forgot theirs are noticed.
    arch = dataclasses.replace(preset("tiny", **changes), swiglu_limits=(None, 0.05, 0.05, 0.05, 0.05))
    built = build_model(arch, settings, context, with_mtp=True)
    init_fresh(arch, Shard(), built.trunk, built.mtp, seed=3)
    return built


def _run(built: BuiltModel) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Hidden states of trunk and MTP layer over 127 tokens, and the gradients of every parameter."""
    trunk = built.trunk
    batch = models.pack((40, 1, 23, 63), vocab=trunk.arch.vocab_size).padded_to(trunk.token_multiple)
    hidden = trunk(batch)
    embedded, rope = trunk.embed(batch.token_ahead(1)), trunk.rope(batch.layout.position_ids_T)
    (mtp,) = built.mtp([embedded], hidden, [rope], batch.layout, [batch.layout.padding_T])
    outputs = [hidden[:127], mtp[:127]]
    sum((x @ trunk.head_weight.T).sin().mean() for x in outputs).backward()
    return [x.detach() for x in outputs], {name: p.grad for name, p in _parameters(built)}


def _parameters(built: BuiltModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for module in built.modules:
        for name, parameter in module.named_parameters():
            yield f"{type(module).__name__}.{name}", parameter


def _same(ours: tuple[list[Tensor], dict[str, Tensor]], theirs: tuple[list[Tensor], dict[str, Tensor]]) -> None:
    for a, b in zip(ours[0], theirs[0], strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert ours[1].keys() == theirs[1].keys()
    for name, grad in theirs[1].items():
        if grad is not None:
            torch.testing.assert_close(ours[1][name], grad, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize(
    "changes", [{}, {"q_lora_rank": None}, {"num_experts": None}], ids=["as it is", "direct queries", "dense"]
)
def test_values_and_gradients(context, changes: dict):
    te_layers.CALLS.clear()
    ours = _run(_built(context, TE, **changes))
    products = {type(module).__name__ for module, _ in te_layers.CALLS}
    expected = {"ColumnLinear", "ReplicatedLinear", "RowLinear", "RMSNorm"}
    assert products == expected | (set() if changes == {"num_experts": None} else {"GroupedLinear"})
    _same(ours, _run(_built(context, LOCAL, **changes)))


def test_parameters_are_the_local_ones(context):
    marks = ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce", "sequence_parallel")
    defaults = (False, -1, 1, True, False)
    ours, theirs = (dict(_parameters(_built(context, settings))) for settings in (TE, LOCAL))
    assert list(ours) == list(theirs)
    for name, parameter in theirs.items():
        assert ours[name].shape == parameter.shape and ours[name].dtype is parameter.dtype, name
        seen = [[getattr(p, mark, default) for mark, default in zip(marks, defaults, strict=True)]
                for p in (ours[name], parameter)]  # fmt: skip
        # Of a weight that no rank splits, nothing reads along which dimension it would be.
        assert seen[0] == seen[1] or (not seen[0][0] and seen[0][3:] == seen[1][3:]), (name, seen)


def test_which_layers_are_whose(context):
    built = _built(context, TE)
    for module in built.modules:
        for name, owner in module.named_modules():
            own = [part for part, _ in owner.named_parameters(recurse=False)]
            if not own:
                continue
            is_te = isinstance(owner, te_layers.Linear | te_layers.RMSNorm)
            kept = ("embedding", "head", "router", "experts", "gate_proj", "self_attention", "o_norm")
            assert is_te != (name.rpartition(".")[2] in kept), name


def test_expert_weights_stay_two_tensors(context):
    experts = _built(context, TE).trunk.decoder.layers[1].mlp.experts
    assert dict(experts.named_parameters()).keys() == {"gate_up", "down"} and not list(experts.children())
    products = [product for pair in experts._products for product in pair]
    assert [len(list(product.parameters())) for product in products] == [16, 16]
    assert all(parameter.is_meta for product in products for parameter in product.parameters())


@pytest.mark.parametrize("fp8", list(RECIPES))
def test_fp8_is_in_force_in_the_trunks_products_alone(context, fp8: str):
    built = _built(context, dataclasses.replace(TE, fp8=fp8))
    te_layers.CALLS.clear()
    ours = _run(built)
    products = [(module, r) for module, r in te_layers.CALLS if not isinstance(module, te_layers.RMSNorm)]
    in_fp8 = {id(module): r for module, r in products if r is not None}
    kind, number_format = RECIPES[fp8]
    assert {(type(r), r.fp8_format) for r in in_fp8.values()} == {(kind, number_format)}
    expected = {}
    for name, module in built.trunk.named_modules():
        if isinstance(module, te_layers.Linear):
            expected[id(module)] = name
        if isinstance(module, te.Experts):
            expected |= {id(product): name for product in module._products[0]}
    # 2 heads of 5 * 64 + 1 rows do not make a multiple of 16.
    out = {key for key, name in expected.items() if name.endswith("in_proj")}
    assert len(out) == 3 and set(in_fp8) == set(expected) - out
    assert len(te.sizes_out_of_fp8(built.trunk)) == 3 and not te.sizes_out_of_fp8(built.mtp)
    assert "3 linears of the trunk compute in full precision" in fp8_note(dataclasses.replace(TE, fp8=fp8), built)
    assert built.mtp.config.fp8 is None
    _same(ours, _run(_built(context, LOCAL)))


def test_fp8_with_recomputed_layers(context):
    settings = dataclasses.replace(TE, fp8="blockwise", recompute="full")
    RECOMPUTED.clear()
    _same(_run(_built(context, settings)), _run(_built(context, LOCAL)))
    assert len(RECOMPUTED) == 5


def test_scores_need_no_multiple_of_tokens(context):
    batch = models.pack((40, 1, 22), vocab=4096)
    ours, theirs = (
        score_batch(_built(context, settings), batch, context, with_logits=True)
        for settings in (dataclasses.replace(TE, fp8="mxfp8"), LOCAL)
    )
    for name in ("logprobs_T", "mtp_logprobs_T", "logits_TV"):
        a, b = getattr(ours, name), getattr(theirs, name)
        assert a.shape[0] == 63
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4, equal_nan=True)


def test_experts_of_a_size_without_fp8_are_refused(context):
    with pytest.raises(UserError, match="model.fp8: 'mxfp8' needs moe_intermediate_size=48 .* multiples of 32"):
        _built(context, dataclasses.replace(TE, fp8="mxfp8"), moe_intermediate_size=48)


def test_an_expert_rank_without_tokens(context):
    experts = _built(context, dataclasses.replace(TE, fp8="blockwise")).trunk.decoder.layers[1].mlp.experts
    tokens = torch.zeros(0, 128, requires_grad=True)
    experts(tokens, torch.zeros(16, dtype=torch.long), torch.zeros(0))[0].sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in experts.parameters())


def _digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def test_checkpoints_training_and_the_view(context, tmp_path: Path):
    settings = dataclasses.replace(TE, fp8="blockwise", expert_bias_rate=1e-3)
    trained = {}
    for name, chosen in (("te", settings), ("local", worlds.FP32)):
        built = worlds.fixture_model("moe", context, chosen)
        arch = built.trunk.arch
        state = build_state(built, context, worlds.OPTIM, steps=10)
        view = publish(built.trunk, built.mtp, Shard(), state.clock)
        before = [tensor.clone() for tensor in tensors_of(view)]
        metrics = worlds.three_steps(state, worlds.microbatches())
        changed = [not torch.equal(a, b) for a, b in zip(tensors_of(view), before, strict=True)]
        assert all(changed), "the view reads the storage that the optimizer writes"
        places = {p.data_ptr() for module in built.modules for p in module.parameters()}
        assert places <= {tensor.data_ptr() for tensor in tensors_of(view)}
        export_hf(tmp_path / name, arch, Shard(), built.trunk, built.mtp)
        trained[name] = (metrics, worlds.whole_tensors(built, "weight"), built)
    (ours, our_weights, built), (theirs, their_weights, _) = trained["te"], trained["local"]
    assert our_weights.keys() == their_weights.keys()
    for name, weight in their_weights.items():
        torch.testing.assert_close(our_weights[name], weight, atol=2e-5, rtol=1e-4, msg=name)
    for a, b in zip(ours, theirs, strict=True):
        assert a["train/lm_loss"] == pytest.approx(b["train/lm_loss"], abs=1e-5)
    # Written by one, read by the other, written again: the same bytes.
    again = build_model(arch, LOCAL, context, with_mtp=True)
    load_hf(tmp_path / "te", arch, Shard(), again.trunk, again.mtp)
    export_hf(tmp_path / "again", arch, Shard(), again.trunk, again.mtp)
    assert _digests(tmp_path / "again") == _digests(tmp_path / "te")
    assert {name for name, _ in built.trunk.named_parameters()} <= trunk_map(arch, Shard()).keys()
    assert {name for name, _ in built.mtp.named_parameters()} == mtp_map(arch, Shard()).keys() - {
        "block.mlp.router.expert_bias"
    }
