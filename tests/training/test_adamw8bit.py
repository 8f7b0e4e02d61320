"""8-bit AdamW: torchao's numbers whatever the pieces, megatron-core's groups and norms, exact continuation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from bailing_mtp.config import OptimConfig
from bailing_mtp.model.build import build_model
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.training import adamw8bit
from bailing_mtp.training.adamw8bit import PackedAdamW8bit
from bailing_mtp.training.optimizer_state import optimizer_shards, optimizer_steps, rank_states
from bailing_mtp.training.pieces import cut
from bailing_mtp.training.state import TrainState, build_state
from bailing_mtp.training.step import accumulate_gradients, train_step
from bailing_mtp.training.update import TrainingDiverged, clip_and_step, finish_gradients
from bailing_mtp.weights.fresh import init_fresh
from bailing_mtp.weights.load import read_architecture
from tests.distributed import worlds
from tests.mtp import models

BF16 = dataclasses.replace(worlds.FP32, dtype=torch.bfloat16, router_dtype=torch.bfloat16)
BATCHES = [models.pack((9, 6, 4), seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def context() -> Iterator[ParallelContext]:
    with worlds.layout(tp=1, ep=1) as found:
        yield found


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that the fixture's parameters fill several, and their rests more than one."""
    monkeypatch.setattr(adamw8bit, "PIECE_ELEMENTS", 2**14)


def state_of(context: ParallelContext, optim: OptimConfig = worlds.EIGHT_BITS, settings=BF16) -> TrainState:
    return build_state(worlds.fixture_model("moe", context, settings), context, optim, 40, models.PLAIN_DDP)


@pytest.mark.parametrize("sizes", [[10], [4096], [5000, 100, 4096, 256, 12_288], [300] * 50, [1, 255, 257]])
def test_pieces_hold_every_element_once(sizes: list[int]):
    seen = [torch.zeros(size, dtype=torch.int) for size in sizes]
    pieces = cut(sizes, 4096)
    for piece in pieces:
        blocks = torch.full((piece.size // 256,), -1)
        assert piece.size <= 4096 and piece.size % 256 == 0
        for index, start, stop, begin in piece.parts:
            seen[index][start:stop] += 1
            assert start % 256 == begin % 256 == 0 and begin + stop - start <= piece.size
            mine = blocks[begin // 256 : -(-(begin + stop - start) // 256)]
            assert (mine == -1).all(), "a block of two tensors"
            mine.fill_(index)
        assert not piece.in_place or piece.parts[0][1:] == (piece.parts[0].start, piece.parts[0].start + 4096, 0)
    assert all((x == 1).all() for x in seen)
    assert len({piece.size for piece in pieces}) == 1, "one shape to compile"


def mains_of(sizes: list[int], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    mains = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    for main in mains:
        main.grad_dtype = torch.float32
    return mains


def packed(mains: list[Tensor], piece_elements: int, **group: float) -> PackedAdamW8bit:
    config = adamw8bit.OptimizerConfig(lr=1e-2, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8)
    return PackedAdamW8bit([{"params": mains, **group}], config, piece_elements)


def set_grads(mains: list[Tensor], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for main in mains:
        main.grad = torch.randn(main.numel(), generator=generator)


@pytest.mark.parametrize("piece_elements", [512, 4096, 2**25])
def test_numbers_are_those_of_torchao_whatever_the_pieces(piece_elements: int):
    from torchao.optim import AdamW8bit

    sizes = [3 * 4096 + 512, 4096, 100, 4000]
    ours, whole = mains_of(sizes, torch.float32), mains_of(sizes, torch.float32)
    adam = packed(ours, piece_elements)
    theirs = AdamW8bit(whole, lr=torch.tensor(1e-2), betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(5):
        set_grads(ours, step)
        set_grads(whole, step)
        adam.step()
        with torch.compiler.set_stance("force_eager"):
            theirs.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, whole, strict=True))


def test_small_parameters_have_fp32_moments():
    mains, plain = mains_of([4095, 128], torch.float32), mains_of([4095, 128], torch.float32)
    adam, adamw = packed(mains, 2**25), torch.optim.AdamW(plain, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(5):
        set_grads(mains, step)
        set_grads(plain, step)
        adam.step()
        adamw.step()
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(mains, plain, strict=True))


def test_updates_below_the_resolution_of_bf16_arrive_on_average():
    mains = [torch.ones(2**16, dtype=torch.bfloat16)]
    mains[0].grad_dtype = torch.float32
    # A hundredth of the step to the next smaller bf16.
    adam = packed(mains, 2**14, lr=2**-8 / 100, weight_decay=0.0)
    for _ in range(50):
        mains[0].grad = torch.ones(2**16)
        adam.step()
    assert float(mains[0].float().mean()) == pytest.approx(1 - 2**-9, rel=1e-4)
    # Every element has noise of its own.
    assert 0.45 < float((mains[0] == 1).float().mean()) < 0.65


def test_noise_depends_on_the_number_of_the_update_alone():
    first, second = mains_of([5000, 300], torch.bfloat16), mains_of([5000, 300], torch.bfloat16)
    for seed, mains in ((1, first), (2, second)):
        torch.manual_seed(seed)
        adam, before = packed(mains, 4096), torch.get_rng_state()
        for step in range(3):
            set_grads(mains, step)
            adam.step()
        assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_scheduler_drives_the_rate_of_every_update(context: ParallelContext):
    mains = [torch.zeros(8192)]
    mains[0].grad_dtype = torch.float32
    adam, moved = packed(mains, 4096, weight_decay=0.0), []
    for rate in (1e-2, 5e-3, 2e-3):
        before = mains[0].clone()
        adam.param_groups[0]["lr"] = rate
        mains[0].grad = torch.ones(8192)
        adam.step()
        moved.append(float((before - mains[0]).mean()))
    # Gradients that never change move a weight by the learning rate.
    assert moved == pytest.approx([1e-2, 5e-3, 2e-3], rel=0.02)
    state = state_of(context, worlds.EIGHT_BITS.model_copy(update={"warmup_steps": 4}))
    rates = [train_step(state, [BATCHES[0]], models.objective()).metrics["train/lr"] for _ in range(5)]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])


def test_learns_as_with_fp32_states(context: ParallelContext):
    losses: dict[str, list[float]] = {}
    for optim in (worlds.OPTIM, worlds.EIGHT_BITS):
        arch = dataclasses.replace(read_architecture(worlds.FIXTURES / "moe"), num_experts=8, moe_intermediate_size=16)
        built = build_model(arch, BF16, context, with_mtp=True)
        init_fresh(arch, worlds.shard_of(context), built.trunk, built.mtp, seed=0)
        state = build_state(built, context, optim, 40, models.PLAIN_DDP)
        steps = [train_step(state, [BATCHES[i % 3]], models.objective()).metrics for i in range(30)]
        losses[optim.name] = [step["train/loss"] for step in steps]
    plain, eight = torch.tensor(losses["adamw"]), torch.tensor(losses["adamw8bit"])
    assert plain[0] == eight[0] and plain[-3:].mean() < plain[:3].mean() - 1
    assert (plain - eight).abs().max() < 0.01 * plain[0]


def prepared(state: TrainState) -> None:
    accumulate_gradients(state, [BATCHES[0]], models.objective())
    finish_gradients(state)
    state.scheduler.step(1)


@pytest.mark.usefixtures("small_pieces")
def test_groups_norms_and_clipping_are_those_of_adamw(context: ParallelContext):
    optim = {"lr": 0.1, "weight_decay": 0.5}
    plain = state_of(context, worlds.OPTIM.model_copy(update=optim), worlds.FP32)
    eight = state_of(context, worlds.EIGHT_BITS.model_copy(update=optim), worlds.FP32)
    norms, clipped = [], []
    for state in (plain, eight):
        prepared(state)
        norms.append(clip_and_step(state, 0.01))
        clipped.append(models.main_grads(state))
    assert norms[0] == pytest.approx(norms[1], rel=1e-6) and min(norms[0].values()) > 0.01
    assert norms[0].keys() == norms[1].keys() == {"trunk", "mtp"}
    for name, grad in clipped[0].items():
        torch.testing.assert_close(clipped[1][name], grad, rtol=1e-5, atol=0)
    for group in ("trunk", "mtp"):
        mine = [grad for name, grad in clipped[1].items() if name.startswith(group)]
        assert torch.cat([grad.flatten() for grad in mine]).norm() == pytest.approx(0.01, rel=1e-3)


def test_weight_decay_spares_what_adamw_spares(context: ParallelContext):
    optim = {"lr": 0.1, "weight_decay": 0.5}
    after = []
    for base in (worlds.OPTIM, worlds.EIGHT_BITS):
        state = state_of(context, base.model_copy(update=optim), worlds.FP32)
        before = models.weights(state)
        models.clear_gradients(state)
        state.scheduler.step(1)
        clip_and_step(state, None)
        after.append(models.weights(state))
    for name, weight in after[0].items():
        torch.testing.assert_close(after[1][name], weight, rtol=1e-6, atol=0)
    spared = {name for name, weight in after[1].items() if torch.equal(weight, before[name])}
    assert {name for name in before if before[name].dim() == 1 and before[name].any()} <= spared
    assert not [name for name in spared if before[name].dim() > 1 and before[name].any()]


@pytest.mark.usefixtures("small_pieces")
def test_weights_keep_their_places_and_a_bad_gradient_changes_nothing(context: ParallelContext):
    state = state_of(context)
    places = {name: p.data_ptr() for chunk in state.chunks for name, p in chunk.module.named_parameters()}
    train_step(state, [BATCHES[0]], models.objective())
    good, moments = models.weights(state), [x.values.clone() for x in rank_states(state.optimizer)]
    hook = next(state.trunk.parameters()).register_hook(lambda grad: grad * float("nan"))
    with pytest.raises(TrainingDiverged):
        train_step(state, [BATCHES[1]], models.objective())
    hook.remove()
    assert all(torch.equal(x, good[name]) for name, x in models.weights(state).items())
    assert all(torch.equal(x.values, kept) for x, kept in zip(rank_states(state.optimizer), moments, strict=True))
    train_step(state, [BATCHES[1]], models.objective())
    changed = models.weights(state)
    assert all(not torch.equal(changed[name], good[name]) for name in good if name.endswith(("_proj.weight", "down")))
    assert {n: p.data_ptr() for chunk in state.chunks for n, p in chunk.module.named_parameters()} == places


def test_states_take_two_bytes_a_parameter(context: ParallelContext):
    state = state_of(context)
    assert not optimizer_shards(state.optimizer) and optimizer_steps(state.optimizer) == 0
    large = small = n_bytes = 0
    for parameter in (p for chunk in state.chunks for p in chunk.module.parameters()):
        large += parameter.numel() if parameter.numel() >= 4096 else 0
        small += parameter.numel() if parameter.numel() < 4096 else 0
    kinds = {moment.values.dtype for moment in rank_states(state.optimizer)}
    n_bytes = sum(moment.values.nbytes for moment in rank_states(state.optimizer))
    assert kinds == {torch.uint8, torch.float32}
    # Two codes, and two fp32 scales for 256 elements; a parameter's last block may be cut.
    assert 0 <= n_bytes - (2 + 8 / 256) * large - 8 * small < 0.01 * n_bytes


def test_a_frozen_mtp_layer_has_no_states(context: ParallelContext):
    built = worlds.fixture_model("moe", context, BF16)
    state = build_state(built, context, worlds.EIGHT_BITS, 40, models.PLAIN_DDP, trains_mtp=False)
    assert {x.parameter for x in rank_states(state.optimizer)} == set(state.trunk.parameters())
