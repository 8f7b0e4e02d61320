"""The training path on a GPU: kernels against their twins, grouped experts against the loop, bf16 against fp32."""

import dataclasses
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bailing_mtp.config import MtpConfig, OptimConfig
from bailing_mtp.contracts import sites
from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.contracts.batch import TokenBatch
from bailing_mtp.kernels import attention
from bailing_mtp.kernels.reference import attention as attention_twin
from bailing_mtp.model.build import BuiltModel, build_model
from bailing_mtp.model.settings import ModelSettings
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.training.objective import PretrainObjective
from bailing_mtp.training.state import build_state
from bailing_mtp.training.step import train_step
from bailing_mtp.weights.fresh import init_fresh
from bailing_mtp.weights.names import Shard
from tests.gpu import cpu_losses
from tests.kernels import train_cases
from tests.model.test_presets import preset
from tests.mtp import models

pytestmark = pytest.mark.gpu

FP32 = ModelSettings(torch.float32, torch.float32)
BF16 = ModelSettings(torch.bfloat16, torch.bfloat16, kda="fla", expert_bias_rate=1e-3)
FAST = dataclasses.replace(BF16, experts="grouped", kernels="triton")
LENGTHS = (700, 1, 300, 23)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_equal_their_twins(context: ParallelContext, dtype: torch.dtype):
    from bailing_mtp.kernels.triton import head, train

    for limit, weighted in ((None, True), (0.7, True), (None, False)):
        train_cases.check_swiglu(train, "cuda", dtype, R=3001, F=512, limit=limit, weighted=weighted)
    train_cases.check_swiglu(train, "cuda", dtype, R=130, F=4608, limit=None, weighted=False)
    train_cases.check_gated_norm(train, "cuda", dtype, T=1001, h=16, V=128)
    train_cases.check_sum_choices(train, "cuda", dtype, T=2001, k=8, H=1536)
    train_cases.check_choose(train, "cuda", R=2001, E=128, k=8, groups=8, kept=4)
    for scale in (1.0, 1.3):
        train_cases.check_head(head, "cuda", dtype, t=200, v=157184, scale=scale)
    train_cases.check_nan_row(head, "cuda")


def _cosine(a: Tensor, b: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0).item()


@pytest.mark.parametrize("lengths", [(512, 512), (300, 1, 700, 23)], ids=["equal", "varied"])
@pytest.mark.parametrize("rows", [0, 2], ids=["documents", "chain"])
@pytest.mark.parametrize("asks", [False, True], ids=["all", "answers"])
def test_attention_equals_the_twin(context: ParallelContext, lengths: tuple[int, ...], rows: int, asks: bool):
    """asks: only a document's last tokens are queries, of the shorter ones all but one."""
    generator = torch.Generator("cuda").manual_seed(0)
    asking = tuple(n // 3 if n > 100 else max(1, n - 1) for n in lengths) if asks else lengths
    n_asking, T = sum(asking), sum(lengths)
    shapes = [(n_asking, 192), (T, 192), (T, 128), *((n_asking, 192), (n_asking, 128)) * rows]
    inputs = [torch.randn(n, 16, d, device="cuda", generator=generator).bfloat16() for n, d in shapes]
    upstream = torch.randn(n_asking, 16, 128, device="cuda", generator=generator)
    results = []
    for kernels, dtype in ((attention, torch.bfloat16), (attention_twin, torch.float32)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        chain = tuple(zip(leaves[3::2], leaves[4::2], strict=True))
        o_Qhv = kernels.chained_causal_attention(
            *leaves[:3], chain, lengths, 192**-0.5, asking if asks else None
        )
        results.append([o_Qhv, *torch.autograd.grad(o_Qhv, leaves, upstream.to(dtype))])
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == torch.bfloat16 and ours.isfinite().all()
        assert (ours.float() - theirs).norm() / theirs.norm() < 1.5e-2


def _arch(vocab: int) -> Architecture:
    return dataclasses.replace(preset("tiny"), vocab_size=vocab)


def _built(arch: Architecture, context: ParallelContext, settings: ModelSettings) -> BuiltModel:
    built = build_model(arch, settings, context, with_mtp=True)
    init_fresh(arch, Shard(), built.trunk, built.mtp, seed=1)
    return built


def _gradients(arch, context, settings: ModelSettings, batch: TokenBatch, mtp: MtpConfig) -> dict[str, Tensor]:
    state = build_state(_built(arch, context, settings), context, OptimConfig(), 10)
    objective = PretrainObjective(mtp)
    batch = batch.to(context.device)
    objective(state, batch, objective.count(batch)).total.backward()
    return {
        f"{index}.{name}": parameter.main_grad.clone()
        for index, chunk in enumerate(state.chunks)
        for name, parameter in chunk.module.named_parameters()
    }


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("objective", ["hard", "soft"])
def test_gradients_of_the_fast_path_follow_the_plain_one(context: ParallelContext, recompute: str, objective: str):
    """Roundings differ, so a few tokens choose other experts, and a gradient that nearly cancels is mostly rounding:
    against fp32 the fast path errs about as the plain one does."""
    arch, batch = _arch(5000), models.pack(LENGTHS, vocab=5000)
    mtp = MtpConfig(loss_scale=0.3, depth=2, objective=objective)
    exact = _gradients(arch, context, FP32, batch, mtp)
    plain = _gradients(arch, context, BF16, batch, mtp)
    fast = _gradients(arch, context, dataclasses.replace(FAST, recompute=recompute), batch, mtp)
    assert fast.keys() == plain.keys()
    cosines = {name: _cosine(fast[name], grad) for name, grad in plain.items() if grad.any()}
    kept = {name: grad for name, grad in exact.items() if grad.any()}
    errors = {name: (1 - _cosine(fast[name], grad), 1 - _cosine(plain[name], grad)) for name, grad in kept.items()}
    print("largest errors, fast and plain", sorted(((*pair, name) for name, pair in errors.items()), reverse=True)[:5])
    assert all(grad.isfinite().all() for grad in fast.values())
    assert all(ours <= 1.5 * theirs + 0.01 for ours, theirs in errors.values())
    assert statistics.median(cosines.values()) >= 0.999


def _answers(batch: TokenBatch) -> TokenBatch:
    """Trained on the second half of every document."""
    n_T = torch.repeat_interleave(*(torch.tensor(batch.layout.lengths),) * 2)
    return dataclasses.replace(batch, loss_mask_T=batch.layout.position_ids_T >= n_T // 2)


@pytest.mark.parametrize("arm", [{"detach": True}, {"objective": "soft", "depth": 2}], ids=["detached", "joint"])
def test_sites_without_targets_change_nothing(
    context: ParallelContext, monkeypatch: pytest.MonkeyPatch, arm: dict[str, Any]
):
    """Half of the tokens trained: the MTP layer on a part of the pack against all of it. In fp32 they are equal; in
    bf16 products of other sizes round differently, and the part errs about as the whole does."""
    arch, batch, mtp = _arch(5000), _answers(models.pack(LENGTHS, vocab=5000)), MtpConfig(loss_scale=0.3, **arm)
    found = {}
    for name, share in (("part", 7 / 8), ("whole", 0.0)):
        monkeypatch.setattr(sites, "WORTHWHILE_SHARE", share)
        assert (sites.DraftSites.of(batch, mtp.depth) is None) == (name == "whole")
        for settings in (FP32, FAST):
            found[name, settings.dtype] = _gradients(arch, context, settings, batch, mtp)
    # A gradient that vanishes, such as that of a norm before another norm, is nothing but rounding.
    exact = {name: grad for name, grad in found["whole", torch.float32].items() if grad.norm() > 1e-6}
    assert len(exact) > 0.9 * len(found["whole", torch.float32])
    worst = min(_cosine(found["part", torch.float32][name], grad) for name, grad in exact.items())
    assert worst > 1 - 1e-6, worst
    part, whole = (
        {name: 1 - _cosine(found[which, torch.bfloat16][name], grad) for name, grad in exact.items()}
        for which in ("part", "whole")
    )
    assert all(part[name] <= 1.5 * error + 0.01 for name, error in whole.items())
    pairs = [_cosine(found["part", torch.bfloat16][name], found["whole", torch.bfloat16][name]) for name in exact]
    assert statistics.median(pairs) >= 0.999


@pytest.mark.parametrize("keeps_inputs", [True, False])
def test_grouped_experts_equal_the_loop(context: ParallelContext, keeps_inputs: bool):
    arch = preset("ling3_tiny")
    arch = dataclasses.replace(arch, num_layers=2, layer_group_size=2, vocab_size=64)
    generator = torch.Generator("cuda").manual_seed(0)
    x, upstream = (torch.randn(2048, 1, 1536, device="cuda", generator=generator).bfloat16() for _ in range(2))
    results = []
    for settings in (BF16, dataclasses.replace(FAST, recompute="none" if keeps_inputs else "selective")):
        built = build_model(arch, settings, context, with_mtp=False)
        init_fresh(arch, Shard(), built.trunk, None, seed=1)
        layer, leaf = built.trunk.decoder.layers[1].mlp, x.clone().requires_grad_()
        out, _ = layer(leaf)
        parameters = dict(layer.named_parameters())
        grads = torch.autograd.grad(out, [leaf, *parameters.values()], upstream)
        results.append({"output": out, **dict(zip(["input", *parameters], grads, strict=True))})
    cosines = {name: _cosine(results[1][name], plain) for name, plain in results[0].items()}
    assert len(cosines) == 7 and min(cosines.values()) >= 0.999, cosines


def test_experts_without_tokens_get_zero_gradients(context: ParallelContext):
    from bailing_mtp.kernels.triton import train
    from bailing_mtp.model.moe import _Experts

    generator = torch.Generator("cuda").manual_seed(2)
    x, gate_up, down = (
        torch.randn(*shape, device="cuda", generator=generator).bfloat16().requires_grad_()
        for shape in ((300, 64), (8, 128, 64), (8, 64, 64))
    )
    # Blocks that held NaN are handed out again.
    del_me = [torch.full((8, 128, 64), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
    del del_me
    ids = torch.tensor([2, 5], device="cuda").repeat(300, 1)
    weights = torch.rand(300, 2, device="cuda").requires_grad_()
    _Experts.apply(train, None, True, ids.numel(), ids, x, weights, gate_up, down).float().sum().backward()
    empty = [0, 1, 3, 4, 6, 7]
    assert not gate_up.grad[empty].any() and not down.grad[empty].any()
    assert gate_up.grad[[2, 5]].any() and gate_up.grad.isfinite().all()


@pytest.mark.parametrize("half", [False, True])
def test_a_second_step_never_waits_inside_its_passes(context: ParallelContext, half: bool):
    arch, batch = _arch(5000), models.pack(LENGTHS, vocab=5000)
    batch = _answers(batch) if half else batch
    state = build_state(_built(arch, context, FAST), context, OptimConfig(), 10)
    objective = PretrainObjective(MtpConfig(loss_scale=0.3, depth=2))
    counts = objective.count(batch)
    batch = batch.to(context.device)
    for _ in range(2):
        train_step(state, [batch], objective)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        objective(state, batch, counts).total.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_bf16_losses_follow_the_cpu(context: ParallelContext, tmp_path: Path):
    """50 steps of the fast path in bf16, and of the plain one in fp32 on the CPU, from the same weights."""
    file = tmp_path / "cpu.pt"
    command = [sys.executable, "-m", "tests.gpu.cpu_losses", str(file)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "8"}
    subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, check=True, timeout=200)
    cpu = torch.load(file)
    built = build_model(cpu_losses.architecture(), FAST, context, with_mtp=True)
    ours = cpu_losses.tensors(built)
    assert ours.keys() == cpu["weights"].keys()
    with torch.no_grad():
        for name, tensor in ours.items():
            tensor.copy_(cpu["weights"][name])
    found = cpu_losses.losses(built, context)
    for step, (our, their) in enumerate(zip(found, cpu["losses"], strict=True)):
        assert abs(our - their) <= 0.02 * their, f"step {step}: {our} and {their}"
    assert found[-1] < 0.9 * found[0]


def test_mtp_adds_less_than_a_gigabyte_at_8k_tokens_and_157k_ids(context: ParallelContext):
    """Field report 15: peak memory of a step's passes, 8,192 tokens, whole vocabulary."""
    arch, peaks = _arch(157184), []
    batch = models.pack((8192,), vocab=5000).to(context.device)
    state = build_state(_built(arch, context, FAST), context, OptimConfig(), 10)
    for mtp in (MtpConfig(), MtpConfig(loss_scale=0.3)):
        objective = PretrainObjective(mtp)
        with state.trunk.no_sync(), state.mtp.no_sync():
            objective(state, batch, objective.count(batch)).total.backward()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            objective(state, batch, objective.count(batch)).total.backward()
            peaks.append(torch.cuda.max_memory_allocated() - before)
    print(f"peak GiB without and with MTP: {peaks[0] / 2**30:.2f} {peaks[1] / 2**30:.2f}")
    assert peaks[0] < peaks[1] <= peaks[0] + 2**30


def test_padding_stays_out_of_the_routers_counts(context: ParallelContext):
    """Field report 13."""
    from bailing_mtp.contracts.batch import PackedLayout

    arch = _arch(5000)
    layout = PackedLayout.build((50, 14, 30, 10), (False, True, False, True))
    ids = torch.randint(0, 5000, (104,), generator=torch.Generator().manual_seed(0))
    state = build_state(_built(arch, context, FAST), context, OptimConfig(), 10)
    objective = PretrainObjective(MtpConfig(loss_scale=0.3))
    batch = TokenBatch(ids, torch.ones(104, dtype=torch.bool), layout).to(context.device)
    objective(state, batch, objective.count(batch)).total.backward()
    for chunk, n_sites in zip(state.chunks, (80, 80 - 4), strict=True):
        counts = [b for name, b in chunk.module.named_buffers() if name.endswith("local_tokens_per_expert")]
        assert counts and all(count.sum().item() == n_sites * arch.experts_per_token for count in counts)
