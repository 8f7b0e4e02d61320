"""A small model with its training forward beside a rollout program on the same weights."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bailing_mtp.config import PretrainConfig
from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.contracts.batch import PackedLayout, TokenBatch
from bailing_mtp.contracts.clock import WeightsClock
from bailing_mtp.kernels.reference.kda_verify import KdaLayerMemory, _replay
from bailing_mtp.model.build import BuiltModel, build_model
from bailing_mtp.parallel import vocab
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.rollout.memory import MemoryPlan, RolloutMemory
from bailing_mtp.rollout.prefill import PrefillPlan
from bailing_mtp.rollout.program import Program
from bailing_mtp.weights.fresh import init_fresh
from bailing_mtp.weights.view import publish
from recipes.compose import compose
from tests.distributed.worlds import FP32, fixture_model, shard_of
from tests.rollout.blocks import assign_blocks
from tests.weights.stand_in import tiny_config

VARIANTS = {
    "direct queries, tied, unbounded decay, clamped": {
        "q_lora_rank": None,
        "tie_word_embeddings": True,
        "kda_safe_gate": False,
        "expert_swiglu_limit_list": [0.0, 0.3, 0.3, 0.3],
        "share_expert_swiglu_limit_list": [0.0, 0.2, 0.2, 0.2],
    },
    "one group, no shared expert": {
        "num_shared_experts": 0,
        "n_group": 1,
        "topk_group": 1,
        "kda_safe_gate": True,
        "kda_lower_bound": -5,
    },
    "dense": {"num_experts": None, "num_shared_experts": 0, "short_conv_kernel_size": 2},
}


def random_model(context: ParallelContext, **changes: object) -> BuiltModel:
    """A very small model whose every weight matters to the logits."""
    built = build_model(Architecture.from_hf(tiny_config(**changes), "test"), FP32, context, with_mtp=True)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for module in built.modules:
            for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
                noise = torch.randn(tensor.shape, generator=generator)
                if tensor.dim() > 1:
                    tensor.copy_(noise * tensor.shape[-1] ** -0.5)
                elif "norm" in name:
                    tensor.copy_(1 + 0.3 * noise)
                elif tensor.is_floating_point():
                    tensor.copy_(0.5 * noise)
    return built


def tiny_model(context: ParallelContext) -> BuiltModel:
    """The demo's architecture with fresh weights."""
    plain = compose(PretrainConfig, "pretrain", ["model=tiny"], run_dir="out")
    arch = Architecture.from_hf(plain["model"]["architecture"], "model.architecture")
    built = build_model(arch, FP32, context, with_mtp=True)
    init_fresh(arch, shard_of(context), built.trunk, built.mtp, seed=1)
    return built


@dataclass
class Rig:
    """Blocks are handed out in an order that mixes sequences."""

    built: BuiltModel
    context: ParallelContext
    program: Program
    memory: RolloutMemory
    free_blocks: list[int]

    @staticmethod
    def make(
        built: BuiltModel,
        context: ParallelContext,
        drafts: int = 3,
        slots: int = 4,
        context_tokens: int = 60,
        block_tokens: int = 4,
        poison: bool = True,
    ) -> Rig:
        """Memory starts as NaN where nothing promises a value, so that reading it shows."""
        for module in built.modules:
            module.eval()
        arch, shard = built.trunk.arch, shard_of(context)
        plan = MemoryPlan.build(arch, shard, drafts, slots, 0, context_tokens, block_tokens, torch.float32)
        memory = RolloutMemory(plan, context.device)
        view = publish(built.trunk, built.mtp, shard, WeightsClock())
        if poison:
            for tensor in (memory.latents_LBbx, *vars(memory.kda).values()):
                tensor.fill_(torch.nan)
        return Rig(built, context, Program(view, memory, context), memory, list(range(plan.n_blocks))[::-1])

    @property
    def vocab_size(self) -> int:
        return self.built.trunk.arch.vocab_size

    def tokens(self, n: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, self.vocab_size, (n,), generator=generator)

    def give_blocks(self, slot: int, n_tokens: int) -> None:
        """A fresh set of blocks that holds n_tokens."""
        n = -(-n_tokens // self.memory.plan.block_tokens)
        blocks = [self.free_blocks.pop(7 * i % len(self.free_blocks)) for i in range(n)]
        assign_blocks(self.memory, slot, 0, blocks)

    def prefill(
        self, parts: Sequence[tuple[int, int, Tensor]], room: int = 60, following: Tensor | None = None
    ) -> Tensor:
        """Prefill (slot, start, all ids of the sequence up to the segment's end); returns trunk hidden states.

        MTP rows are written for all positions but the last of each segment, and for those too when
        `following` gives the token after each segment.
        """
        for slot, start, _ in parts:
            if start == 0 and slot != self.memory.scratch_slot:
                self.give_blocks(slot, room)
        plan = PrefillPlan.build([(s, start, len(ids) - start) for s, start, ids in parts], self.context.device)
        hidden_TH = self.program.prefill(plan, torch.cat([ids[start:] for _, start, ids in parts]))
        if self.memory.plan.speculative_tokens:
            after = torch.zeros(len(parts), dtype=torch.long) if following is None else following
            next_ids = torch.cat([
                torch.cat((ids[start + 1 :], after[i : i + 1])) for i, (_, start, ids) in enumerate(parts)
            ])  # fmt: skip
            known_T = torch.cat([torch.arange(start, len(ids)) < len(ids) - 1 for _, start, ids in parts])
            known_T |= following is not None
            self.program.mtp_prefill(plan, next_ids, hidden_TH, known_T)
        return hidden_TH

    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's logits."""
        return self.program.logits(hidden)

    def slots(self, *slots: int) -> Tensor:
        return torch.tensor(slots)

    def commit(self, slots_n: Tensor, committed: Sequence[int]) -> None:
        self.memory.commit(slots_n, torch.tensor(committed))

    # The training side.

    def batch(self, ids: Tensor) -> TokenBatch:
        return TokenBatch(ids, torch.ones_like(ids, dtype=torch.bool), PackedLayout.build([len(ids)]))

    @torch.no_grad()
    def trained_hidden(self, ids: Tensor) -> Tensor:
        """The trunk's hidden states of one document; one tensor-parallel rank only."""
        return self.built.trunk(self.batch(ids)).squeeze(1)

    def trained_mtp(self, next_ids: Tensor, hidden_TH: Tensor) -> Tensor:
        """The MTP layer's hidden states of one document, from any hidden states below it."""
        return self.trained_depths([next_ids], hidden_TH)[0]

    @torch.no_grad()
    def trained_depths(self, ids_ahead: Sequence[Tensor], hidden_TH: Tensor) -> list[Tensor]:
        """The MTP layer unrolled; ids_ahead[d-1]: the token d positions after each site."""
        trunk, layout = self.built.trunk, self.batch(ids_ahead[0]).layout
        depths = range(len(ids_ahead))
        outputs = self.built.mtp(
            [trunk.embed(ids) for ids in ids_ahead],
            hidden_TH.unsqueeze(1),
            [trunk.rope(layout.position_ids_T + d) for d in depths],
            layout,
            [layout.padding_T for _ in depths],
        )
        return [out.squeeze(1) for out in outputs]

    def trained_logits(self, hidden: Tensor) -> Tensor:
        return vocab.head_logits(hidden, self.built.trunk.head_weight.detach())

    # What a slot holds, independent of buffers.

    def settled(self, slot: int) -> tuple[Tensor, Tensor, Tensor]:
        """States after all committed tokens, the last raw convolution inputs, and all cached rows of the trunk."""
        kda, slots = self.memory.kda, self.memory.slots
        at, count = torch.tensor([slot]), slots.count[slot].long()[None]
        parity, taps = slots.parity[slot].long()[None], self.memory.plan.conv_kernel
        states, windows = [], []
        for layer in range(self.memory.plan.n_kda):
            doubled = list(vars(kda).values())[1:]
            fields = KdaLayerMemory(kda.state_LNhVD[layer], *(x[:, layer] for x in doubled))
            states.append(_replay(fields, at, parity, count)[0])
            window = fields.window_2NwX[parity[0], slot]
            windows.append(window[int(count) : int(count) + taps - 1])
        return torch.stack(states), torch.stack(windows), self.cached_rows(slot, int(slots.position[slot]))

    def cached_rows(self, slot: int, n_tokens: int, mtp: bool = False) -> Tensor:
        """Latent rows of positions 0 .. n_tokens-1, of the trunk's layers or of the MTP layer."""
        blocks = self.memory.slots.block_table_NM[slot].long()
        rows = self.memory.latents_LBbx[:, blocks].flatten(1, 2)[:, :n_tokens]
        return rows[-1:] if mtp else rows[: rows.shape[0] - (self.memory.plan.speculative_tokens > 0)]


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


__all__ = ["VARIANTS", "Rig", "close", "fixture_model", "random_model", "tiny_model"]
