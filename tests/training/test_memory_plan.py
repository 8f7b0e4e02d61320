"""The memory plan: activations against what autograd saves, states counted by hand, the H200's figures, the refusal."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch

from bailing_mtp.config import MtpConfig, OptimConfig
from bailing_mtp.errors import UserError
from bailing_mtp.model.build import build_model, build_on_meta, count_parameters
from bailing_mtp.model.settings import ModelSettings
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.training.activations import (
    Block,
    PassSizes,
    backward_peak,
    layer_of,
    pass_bytes,
    ranks_of_a_token,
    whole_layer_again,
)
from bailing_mtp.training.memory_plan import (
    GIB,
    RESERVE,
    PlanInputs,
    RolloutBytes,
    count_model,
    optimizer_states,
    plan_training,
    require_fit,
    step_bytes,
    ways_to_fit,
)
from bailing_mtp.training.optimizer_state import allocate, optimizer_shards, rank_states
from bailing_mtp.training.state import build_state
from tests.distributed.worlds import layout
from tests.model.test_presets import preset
from tests.training.saved import on_cpu, on_fake_gpu

FAST = ModelSettings(torch.bfloat16, torch.bfloat16, kda="fla", experts="grouped", kernels="triton")
OFF, JOINT = MtpConfig(), MtpConfig(loss_scale=0.3)
PLAIN = ModelSettings(torch.bfloat16, torch.bfloat16)
"""For counts, without importing fla."""
DEEP = MtpConfig(loss_scale=0.3, depth=2, objective="soft")
LENGTHS = (300, 212, 512)


@pytest.fixture(scope="module")
def context() -> Iterator[ParallelContext]:
    with layout(tp=1, ep=1) as found:
        yield found


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("mtp", [OFF, JOINT, DEEP], ids=["off", "joint", "depth 2 soft"])
def test_activations_of_the_gpu_path_are_what_autograd_saves(context: ParallelContext, recompute: str, mtp: MtpConfig):
    settings = dataclasses.replace(FAST, recompute=recompute)
    for arch in (preset("tiny"), preset("tiny", q_lora_rank=None), preset("ling3_tiny", num_hidden_layers=4)):
        saved = on_fake_gpu(arch, settings, mtp, LENGTHS, context)
        # Masks and counts of the loss are a few bytes a token.
        assert pass_bytes(PassSizes(arch, settings, sum(LENGTHS)), mtp).kept == pytest.approx(saved, rel=2e-3)


def test_activations_of_the_torch_twins_are_near_what_autograd_saves(context: ParallelContext):
    """In fp32: norms of 16-bit tensors are another function on the CPU."""
    settings = ModelSettings(torch.float32, torch.float32)
    for arch in (preset("tiny"), preset("tiny", head_dim=32, v_head_dim=32), preset("tiny", hidden_size=256)):
        saved = on_cpu(arch, settings, OFF, LENGTHS, context)
        assert pass_bytes(PassSizes(arch, settings, sum(LENGTHS)), OFF).kept == pytest.approx(saved, rel=0.1)


def test_a_backward_frees_block_by_block():
    blocks = [Block(kept=10, working=1), Block(kept=20, working=2, again=30), Block(kept=5, working=1)]
    assert backward_peak(blocks) == 10 + 20 + 30 + 2
    assert backward_peak([*blocks, Block(kept=1, working=40)]) == 36 + 40


def test_full_recompute_makes_one_layer_again():
    arch = preset("ling3_tiny")
    layer = layer_of(PassSizes(arch, FAST, 1024), arch.trunk_plan()[1])
    again = whole_layer_again(layer)
    assert again.kept == 1024 * 1536 * 2
    most = max(layer.mixer.kept + layer.mlp.kept + layer.mlp.working, layer.mixer.kept + layer.mixer.working)
    assert again.kept + again.working == most


def test_tensor_parallel_ranks_keep_shards():
    arch = preset("ling3_tiny")
    whole, half = (layer_of(PassSizes(arch, FAST, 8192, tp), arch.trunk_plan()[3]) for tp in (1, 2))
    assert half.input * 2 == whole.input
    assert half.mixer.kept == pytest.approx(whole.mixer.kept / 2, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_gradients_and_states_are_those_of_a_run(context: ParallelContext, dtype: torch.dtype):
    arch, settings = preset("tiny"), ModelSettings(dtype, dtype)
    built = build_model(arch, settings, context, with_mtp=True)
    counts = count_model(build_on_meta(arch, settings, context).modules)
    assert counts == count_model(built.modules)
    state = build_state(built, context, OptimConfig(), 10)
    buffers = [x for chunk in state.chunks for x in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    padded = sum(buffer.grad_data.nbytes for buffer in buffers)
    assert counts.trained * 4 <= padded <= counts.trained * 4 * 1.01
    allocate(state.optimizer, 1)
    states = optimizer_states(counts, OptimConfig(), dp=1, expert_dp=1)
    found = {"master": 0, "exp_avg": 0, "exp_avg_sq": 0}
    for shard in optimizer_shards(state.optimizer):
        for name, tensor in shard.states.items():
            found[name] += tensor.nbytes
    assert states == (found["master"], found["exp_avg"] + found["exp_avg_sq"])
    held = [*(p for m in built.modules for p in m.parameters()), *(x for m in built.modules for x in m.buffers())]
    assert counts.weight_bytes == sum(x.numel() * x.itemsize for x in held)
    assert counts.largest == 4096 * 128


def test_states_by_optimizer_and_ranks(context: ParallelContext):
    counts = count_model(build_on_meta(preset("ling3_tiny"), PLAIN, context).modules)
    n_half, n_full = counts.dense_half + counts.expert_half, counts.dense_fp32
    assert counts.expert_fp32 == 0 and n_full == 18 * 16 * (128 + 1)
    assert n_half + n_full == 8_209_997_600 - 24 * 128
    adamw, eight = OptimConfig(), OptimConfig(name="adamw8bit")
    assert optimizer_states(counts, adamw, 1, 1) == (4 * n_half, 8 * (n_half + n_full))
    eight_bytes = optimizer_states(counts, eight, 1, 1)
    assert eight_bytes.master == 0 and eight_bytes.moments == pytest.approx(n_half * (2 + 8 / 256), rel=1e-3)
    sharded = optimizer_states(counts, adamw, 8, 2)
    assert sharded.master == pytest.approx(4 * (counts.dense_half / 8 + counts.expert_half / 2), rel=1e-6)
    trunk = build_on_meta(preset("tiny"), PLAIN, context).trunk
    frozen = count_model([trunk], [torch.nn.Linear(8, 8, bias=False)])
    assert frozen.weight_bytes == count_model([trunk]).weight_bytes + 256
    assert frozen.trained == sum(p.numel() for p in trunk.parameters())


MEASURED = (
    (OFF, "none", 79.5), (OFF, "selective", 75.1), (OFF, "full", 70.0),
    (JOINT, "none", 85.7), (JOINT, "selective", 81.0), (JOINT, "full", 76.0),
    (MtpConfig(loss_scale=0.3, depth=2), "none", 86.6),
)  # fmt: skip
"""GiB on one H200, docs/measurements.md: 12 layers of ling3_tiny, 8,192 tokens, adamw."""


def inputs_of(
    context: ParallelContext, layers: int, mtp: MtpConfig, recompute: str, optim: OptimConfig, tokens: int = 8192
) -> PlanInputs:
    arch = preset("ling3_tiny", num_hidden_layers=layers)
    built = build_on_meta(arch, PLAIN, context)
    counts = count_model([built.trunk] if mtp.loss_scale is None else built.modules)
    return PlanInputs(counts, PassSizes(arch, dataclasses.replace(FAST, recompute=recompute), tokens), optim, mtp)


@pytest.mark.parametrize(("mtp", "recompute", "gib"), MEASURED)
def test_the_figures_of_the_gpu(context: ParallelContext, mtp: MtpConfig, recompute: str, gib: float):
    plan = plan_training(inputs_of(context, 12, mtp, recompute, OptimConfig()))
    assert plan.peak == ("forward and backward", pytest.approx(gib * GIB, rel=0.01))


def test_offloaded_states_come_back_during_a_step(context: ParallelContext):
    away, here = (inputs_of(context, 24, JOINT, "full", OptimConfig(offload=place)) for place in ("cpu", "none"))
    states = optimizer_states(away.counts, away.optim, 1, 1)
    difference = plan_training(here).phases["forward and backward"] - plan_training(away).phases["forward and backward"]
    assert difference == sum(states)
    phase, peak = plan_training(away).peak
    # Weights, gradients, master weights, and the moments of a slice of 1 GiB of parameters.
    expected = away.counts.weight_bytes + 4 * away.counts.trained + states.master + 2 * GIB
    assert phase == "optimizer step" and peak == pytest.approx(expected, rel=0.01)
    assert step_bytes(here.counts, here.optim, states) == 0


def test_a_rollout_takes_its_turn_or_stays(context: ParallelContext):
    inputs = inputs_of(context, 4, JOINT, "none", OptimConfig())
    alone = plan_training(inputs)
    rollout = RolloutBytes(memory=7 * GIB, graphs=GIB, working=2 * GIB, stays=False)
    turns = plan_training(dataclasses.replace(inputs, rollout=rollout))
    assert turns.phases["forward and backward"] == alone.phases["forward and backward"]
    assert turns.phases["rollout"] == sum(alone.parts.values()) + 10 * GIB
    stays = plan_training(dataclasses.replace(inputs, rollout=dataclasses.replace(rollout, stays=True)))
    assert stays.phases["forward and backward"] == alone.phases["forward and backward"] + 8 * GIB
    assert stays.phases["rollout"] == turns.phases["rollout"]


def test_a_token_goes_to_the_ranks_of_its_groups():
    """The most ranks that any choice of groups and of experts in them reaches."""
    base = preset("tiny")
    sizes = ((16, 4, 2, 4), (16, 8, 4, 8), (24, 3, 1, 4), (24, 1, 1, 3), (24, 6, 2, 3))
    for n_experts, n_groups, per_token, k in sizes:
        arch = dataclasses.replace(
            base, num_experts=n_experts, num_groups=n_groups, groups_per_token=per_token, experts_per_token=k
        )
        size = n_experts // n_groups
        for ep in (ep for ep in range(1, n_experts + 1) if n_experts % ep == 0):
            reached = 0
            for groups in itertools.combinations(range(n_groups), per_token):
                experts = [expert for group in groups for expert in range(group * size, (group + 1) * size)]
                reached = max(reached, min(k, len({expert * ep // n_experts for expert in experts})))
            bound = ranks_of_a_token(arch, ep)
            uneven = n_groups % ep and ep % n_groups
            assert reached == bound or (uneven and reached < bound), (sizes, ep, reached, bound)


def test_a_run_that_cannot_fit_is_refused_with_ways_to_fit(context: ParallelContext):
    inputs = inputs_of(context, 24, JOINT, "none", OptimConfig())
    plan, room = plan_training(inputs), 140 * GIB
    with pytest.raises(UserError) as refused:
        require_fit(inputs, room)
    text = str(refused.value)
    assert f"needs {plan.peak[1] / GIB:.1f} GiB at its peak (forward and backward), and 135.8" in text
    smaller = dataclasses.replace(inputs, optim=OptimConfig(name="adamw8bit"))
    assert f"optim.name=adamw8bit ({plan_training(smaller).peak[1] / GIB:.1f})" in text
    for key in ("optim.offload=cpu", "train.recompute=selective", "train.microbatch_tokens=4096"):
        assert f"{key} (" in text
    assert "parallel.tp or parallel.ep" in text and "rollout" not in text.splitlines()[0]
    with_rollout = dataclasses.replace(inputs, rollout=RolloutBytes(GIB, 0, 0, stays=True))
    with pytest.raises(UserError, match="rollout.memory_gb or rollout.max_running"):
        require_fit(with_rollout, room)
    assert require_fit(smaller, room) == plan_training(smaller)


@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
def test_weights_move_into_buffers_at_the_start(context: ParallelContext, name: str):
    built, optim = build_model(preset("tiny"), PLAIN, context, with_mtp=False), OptimConfig(name=name)
    before = {n: p.data_ptr() for n, p in built.trunk.named_parameters()}
    build_state(built, context, optim, 10)
    assert not [n for n, p in built.trunk.named_parameters() if p.data_ptr() == before[n]]
    counts = count_model(built.modules)
    plan = plan_training(PlanInputs(counts, PassSizes(preset("tiny"), PLAIN, 64), optim, OFF))
    expected = 2 * max(counts.dense_half, counts.expert_half)
    if name == "adamw":
        expected = max(expected, optimizer_states(counts, optim, 1, 1).master)
    assert plan.phases["start"] == counts.weight_bytes + 4 * counts.trained + expected


def test_the_reserve_counts(context: ParallelContext):
    inputs = inputs_of(context, 4, OFF, "full", OptimConfig())
    peak = plan_training(inputs).peak[1]
    require_fit(inputs, int(peak / (1 - RESERVE)) + 1024)
    with pytest.raises(UserError):
        require_fit(inputs, peak + 1024)


def test_lines_name_every_part_and_the_rest(context: ParallelContext):
    inputs = inputs_of(context, 12, OFF, "none", OptimConfig())
    text = "\n".join(plan_training(inputs).lines(100 * GIB))
    n_bytes = count_parameters(build_on_meta(inputs.passes.arch, PLAIN, context).trunk)
    assert f"weights {n_bytes * 2 / GIB:.1f}  gradients {n_bytes * 4 / GIB:.1f}" in text
    assert "peak 79.5 (forward and backward) of 100.0; in reserve 3.0, left 17.5" in text


def test_a_model_on_meta_takes_no_memory_of_a_gpu(context: ParallelContext):
    """With the context of a GPU parameters name a device of their own: here what stands for the current GPU."""
    on_gpu = dataclasses.replace(context, device=torch.device("cuda", 0))
    built = build_on_meta(preset("tiny"), PLAIN, on_gpu)
    assert all(p.is_meta for module in built.modules for p in module.parameters())


def test_ways_to_fit_are_ways_that_exist(context: ParallelContext):
    inputs = inputs_of(context, 4, OFF, "full", OptimConfig())
    assert {key for key, _ in ways_to_fit(inputs)} == {
        "optim.offload=cpu", "optim.name=adamw8bit", "train.microbatch_tokens=4096"
    }  # fmt: skip
    # 8-bit states are not sharded, and stay on the device.
    for other in (
        dataclasses.replace(inputs, dp=2),
        dataclasses.replace(inputs, expert_dp=2),
        dataclasses.replace(inputs, optim=OptimConfig(offload="cpu")),
        dataclasses.replace(inputs, optim=OptimConfig(name="adamw8bit")),
        # apex updates neither.
        dataclasses.replace(inputs, optim=OptimConfig(fused="apex")),
    ):
        keys = {key for key, _ in ways_to_fit(other)}
        assert "optim.name=adamw8bit" not in keys
        assert ("optim.offload=cpu" in keys) == (other.optim == OptimConfig())
    for least_tokens, halves in ((4096, True), (4097, False)):
        keys = {key for key, _ in ways_to_fit(dataclasses.replace(inputs, least_tokens=least_tokens))}
        assert ("train.microbatch_tokens=4096" in keys) == halves


def test_eight_bit_states_are_those_of_a_run(context: ParallelContext):
    for dtype in (torch.float32, torch.bfloat16):
        built = build_model(preset("tiny"), ModelSettings(dtype, dtype), context, with_mtp=True)
        optim = OptimConfig(name="adamw8bit")
        planned = optimizer_states(count_model(built.modules), optim, 1, 1)
        state = build_state(built, context, optim, 10)
        held = sum(x.values.numel() * x.values.itemsize for x in rank_states(state.optimizer))
        # Norms and the like have fp32 moments.
        assert planned.master == 0 and planned.moments == pytest.approx(held, rel=0.02) and planned.moments < held


def test_eight_bit_states_are_updated_in_pieces(context: ParallelContext):
    inputs = inputs_of(context, 4, OFF, "full", OptimConfig(name="adamw8bit"))
    states = optimizer_states(inputs.counts, inputs.optim, 1, 1)
    assert step_bytes(inputs.counts, inputs.optim, states) == 2**25 * 6
