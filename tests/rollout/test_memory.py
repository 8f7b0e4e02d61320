"""The plan's bytes are the memory's bytes, a budget is kept or refused, and release gives everything back."""

import gc
import weakref

import pytest
import torch

from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.errors import UserError
from bailing_mtp.kernels.reference import decode
from bailing_mtp.rollout.memory import GIB, MemoryPlan, RolloutMemory
from bailing_mtp.weights.names import Shard
from tests.weights.stand_in import tiny_config

ARCH = Architecture.from_hf(tiny_config(), "test")
CPU = torch.device("cpu")
WHOLE = Shard()


def plan_of(drafts: int = 2, budget_bytes: int | None = None, shard: Shard = WHOLE, running: int = 3) -> MemoryPlan:
    return MemoryPlan.build(ARCH, shard, drafts, running, 1, 10, 4, torch.bfloat16, budget_bytes)


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("shard", [WHOLE, Shard(tp=2)])
def test_the_plan_counts_every_byte(drafts, shard):
    plan = plan_of(drafts, shard=shard)
    memory = RolloutMemory(plan, CPU)
    memory.rope_P = decode.rope_table(torch.arange(plan.capacity_tokens), ARCH.qk_rope_head_dim, ARCH.rope_theta)
    assert sum(tensor.nbytes for tensor in memory.tensors()) == plan.total_bytes
    # One MLA layer, and the MTP layer when there are drafts; three blocks of four tokens hold ten.
    assert memory.latents_LBbx.shape == (1 + (drafts > 0), 4 * 3 + 1, 4, 7 + 2)
    assert memory.kda.state_LNhVD.shape == (2, 5, 4 // shard.tp, 4, 6)
    assert memory.kda.rec_update_2LNRhV.shape == (2, 2, 5, drafts + 1, 4 // shard.tp, 4)
    assert memory.kda.conv_window_2LNwX.shape == (2, 2, 5, 3 + drafts + 1, 4 // shard.tp * 16)
    assert memory.slots.mtp_hidden_NH.shape == (5, 12 if drafts else 0)
    assert memory.slots.block_table_NM.unique().tolist() == [memory.scratch_block]


def test_a_budget_limits_the_blocks():
    full = plan_of()
    for n_blocks in (3, 7, 12):
        budget = full.total_bytes - (12 - n_blocks) * full.block_bytes
        assert plan_of(budget_bytes=budget + full.block_bytes - 1).n_blocks == n_blocks
        assert plan_of(budget_bytes=budget).total_bytes == budget
    assert plan_of(budget_bytes=2 * full.total_bytes) == full


def test_too_small_a_budget_names_the_least_that_works():
    running = 4000
    full = plan_of(running=running)
    least = full.total_bytes - (full.n_blocks - 3) * full.block_bytes
    with pytest.raises(UserError, match=r"^rollout\.memory_gb: 0\.001 is too little") as refused:
        plan_of(budget_bytes=GIB // 1000, running=running)
    named_gb = float(str(refused.value).split("at least ")[1].split()[0])
    assert least <= named_gb * GIB <= least + GIB // 1000
    assert plan_of(budget_bytes=int(named_gb * GIB), running=running).n_blocks >= 3


def test_release_gives_every_byte_back():
    memory = RolloutMemory(plan_of(), CPU)
    alive = [weakref.ref(tensor) for tensor in memory.tensors()]
    assert len(alive) == 6 + len(vars(memory.slots)) and all(ref() is not None for ref in alive)
    memory.release()
    gc.collect()
    assert not [ref for ref in alive if ref() is not None]


def test_reset_forgets_one_slot_alone():
    memory = RolloutMemory(plan_of(), CPU)
    fresh = RolloutMemory(plan_of(), CPU)
    for tensor in memory.tensors():
        tensor.fill_(1)
    memory.reset_slot(2)
    for ours, theirs in zip(_per_slot(memory), _per_slot(fresh), strict=True):
        assert torch.equal(ours[2], theirs[2])
        assert bool((ours[[0, 1, 3, 4]] == 1).all())


def test_copies_take_the_sequence_and_leave_the_request():
    memory = RolloutMemory(plan_of(), CPU)
    for number, tensor in enumerate(_per_slot(memory)):
        tensor[1] = number % 2 + 1
    memory.slots.temperature[3] = 5.0
    memory.slots.prompt_index[0] = 9
    memory.copy_slots(torch.tensor([1, 1]), torch.tensor([3, 0]))
    for by_slot in memory.kda.by_slot():
        assert torch.equal(by_slot[3], by_slot[1]) and torch.equal(by_slot[0], by_slot[1])
        assert bool((by_slot[2] == 0).all())
    for name in ("block_table_NM", "count", "parity", "position", "pending", "mtp_hidden_NH"):
        tensor = getattr(memory.slots, name)
        assert torch.equal(tensor[3], tensor[1]) and not torch.equal(tensor[2], tensor[1]), name
    assert float(memory.slots.temperature[3]) == 5.0 and int(memory.slots.prompt_index[0]) == 9


def test_a_block_is_copied_in_every_cache():
    memory = RolloutMemory(plan_of(), CPU)
    memory.latents_LBbx.copy_(torch.randn(memory.latents_LBbx.shape))
    before = memory.latents_LBbx.clone()
    memory.copy_block(4, 7)
    order = list(range(memory.plan.n_blocks + 1))
    order[7] = 4
    assert torch.equal(memory.latents_LBbx, before[:, order])


def test_commit_moves_the_slots_of_the_step_only():
    memory = RolloutMemory(plan_of(), CPU)
    scratch = memory.scratch_slot
    memory.slots.position[:4] = torch.tensor([5, 6, 7, 8], dtype=torch.int32)
    memory.commit(torch.tensor([2, scratch, 0, scratch]), torch.tensor([3, 2, 0, 1]))
    memory.commit(torch.tensor([2]), torch.tensor([1]))
    assert memory.slots.position.tolist() == [5, 6, 11, 8, 0]
    assert memory.slots.count.tolist() == [0, 0, 1, 0, 0]
    assert memory.slots.parity.tolist() == [1, 0, 0, 0, 0]


def _per_slot(memory: RolloutMemory) -> list[torch.Tensor]:
    return [*memory.kda.by_slot(), *vars(memory.slots).values()]
