"""All device memory of a rollout, planned in bytes and owned in one place.

Sequences live in slots (linear-attention state, records of the last step, per-sequence numbers) and in blocks
(paged rows of the latent cache). One more slot and one more block than can be handed out are scratch: padded
rows of a step, and positions past the context limit, write there.

Shape legend: N slots (index N is the scratch slot), B blocks (index B is the scratch block), M blocks of the
longest sequence, b tokens of a block, L layers of a kind, R records of a step (drafts + 1), W convolution
taps, X convolution channels, h heads of this rank, D key size, V value size, C latent rank, r rotary size,
H hidden size, m slots of a call, n rows of a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.errors import UserError
from bailing_mtp.kernels.reference.settle import Book, SlotNumbers, commit
from bailing_mtp.weights.names import Shard

GIB = 2**30


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes of a RolloutMemory."""

    n_slots: int
    """Slots that can be handed out: running rows first, then templates."""
    n_blocks: int
    block_tokens: int
    context_tokens: int
    """Longest sequence in tokens, prompt and response."""
    speculative_tokens: int
    """Largest number of drafts of a step (K); 0: no memory for the MTP layer."""
    n_kda: int
    n_mla: int
    """Latent caches: one per MLA layer of the trunk, and the last one for the MTP layer when K > 0."""
    heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    latent_dim: int
    """Values of a cached row: latent rank and rotary size."""
    rope_dim: int
    hidden_size: int
    dtype: torch.dtype
    max_stops: int
    max_suppressed: int
    beside_bytes: int = 0
    """What the rollout holds beside this memory for as long: rows of a reduced head, rooms of sums over peer memory."""

    @staticmethod
    def build(
        arch: Architecture,
        shard: Shard,
        speculative_tokens: int,
        max_running: int,
        n_templates: int,
        context_tokens: int,
        block_tokens: int,
        dtype: torch.dtype,
        budget_bytes: int | None = None,
        max_stops: int = 16,
        max_suppressed: int = 64,
        beside_bytes: int = 0,
    ) -> MemoryPlan:
        """Plan for `max_running` rows and `n_templates` shared prompts of at most `context_tokens` tokens.

        Without a budget every slot can fill its context. Within one, slots come first and blocks share the
        rest. Raises UserError naming rollout.memory_gb when not even one whole context fits beside the slots.
        """
        plans = arch.trunk_plan()
        n_kda = sum(plan.mixer == "kda" for plan in plans)
        n_slots = max_running + n_templates
        blocks_per_context = -(-context_tokens // block_tokens)
        full = MemoryPlan(
            n_slots=n_slots,
            n_blocks=n_slots * blocks_per_context,
            block_tokens=block_tokens,
            context_tokens=context_tokens,
            speculative_tokens=speculative_tokens,
            n_kda=n_kda,
            n_mla=len(plans) - n_kda + (speculative_tokens > 0),
            heads=arch.num_heads // shard.tp,
            key_dim=arch.kda_head_dim,
            value_dim=arch.v_head_dim,
            conv_kernel=arch.conv_kernel,
            latent_dim=arch.kv_lora_rank + arch.qk_rope_head_dim,
            rope_dim=arch.qk_rope_head_dim,
            hidden_size=arch.hidden_size,
            dtype=dtype,
            max_stops=max_stops,
            max_suppressed=max_suppressed,
            beside_bytes=beside_bytes,
        )
        return full if budget_bytes is None else full.within(budget_bytes)

    def within(self, budget_bytes: int) -> MemoryPlan:
        """The same slots with as many blocks as the budget allows, never more than now. Raises UserError."""
        least_bytes = self.fixed_bytes + self.max_blocks * self.block_bytes
        if budget_bytes < least_bytes:
            raise UserError(
                f"rollout.memory_gb: {budget_bytes / GIB:.4g} is too little; {self.n_slots} slots of "
                f"{self.slot_bytes / 2**20:.4g} MiB and one context of {self.context_tokens} tokens need at "
                f"least {math.ceil(least_bytes / GIB * 1000) / 1000:g} (or fewer rollout.max_running)"
            )
        n_blocks = (budget_bytes - self.fixed_bytes) // self.block_bytes
        return MemoryPlan(**{**self._values(), "n_blocks": min(self.n_blocks, n_blocks)})

    def _values(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest sequence (M)."""
        return -(-self.context_tokens // self.block_tokens)

    @property
    def capacity_tokens(self) -> int:
        """Positions that a whole block table reaches."""
        return self.max_blocks * self.block_tokens

    @property
    def records(self) -> int:
        """Tokens that a step can feed (R); the stride of records whatever a step's number of drafts."""
        return self.speculative_tokens + 1

    @property
    def conv_channels(self) -> int:
        """Channels of q, k and v of this rank's heads."""
        return self.heads * (2 * self.key_dim + self.value_dim)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return sum(_n_bytes(shape, dtype) for shape, dtype in self.kda_shapes(1) + self.slot_shapes(1))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, in all latent caches together."""
        return _n_bytes((self.n_mla, self.block_tokens, self.latent_dim), self.dtype)

    @property
    def rope_bytes(self) -> int:
        """Bytes of the rotations of all positions, a cosine and a sine for each pair."""
        return self.capacity_tokens * self.rope_dim * torch.float32.itemsize

    @property
    def fixed_bytes(self) -> int:
        """Bytes of all slots, the scratch slot and the scratch block, the rotations, and of what is held beside."""
        return (self.n_slots + 1) * self.slot_bytes + self.block_bytes + self.rope_bytes + self.beside_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole memory."""
        return self.fixed_bytes + self.n_blocks * self.block_bytes

    def kda_shapes(self, n: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of the fields of KdaMemory for `n` slots, in their order."""
        window = self.conv_kernel - 1 + self.records
        key = (2, self.n_kda, n, self.records, self.heads, self.key_dim)
        return [
            ((self.n_kda, n, self.heads, self.value_dim, self.key_dim), torch.float32),
            ((2, self.n_kda, n, window, self.conv_channels), self.dtype),
            (key, torch.float32),
            (key, torch.float32),
            ((*key[:-1], self.value_dim), torch.float32),
        ]

    def slot_shapes(self, n: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of the fields of SlotState for `n` slots, in their order."""
        i32, f32 = torch.int32, torch.float32
        hidden = self.hidden_size if self.speculative_tokens else 0
        return [
            ((n, self.max_blocks), i32),
            *[((n,), i32)] * 3,
            ((n,), torch.int64),
            ((n, hidden), self.dtype),
            ((n,), f32),
            ((n,), i32),
            ((n,), f32),
            *[((n,), i32)] * 3,
            *[((n,), torch.bool)] * 2,
            ((n, self.max_stops), i32),
            ((n, self.max_suppressed), i32),
            *[((n,), i32)] * 3,
            ((n,), torch.int64),
        ]


def _n_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


@dataclass
class KdaMemory:
    """Linear-attention layers: states, and what the last step fed, kept twice (read one, write the other)."""

    state_LNhVD: Tensor
    """fp32; covers all committed tokens but the last `count` ones."""
    conv_window_2LNwX: Tensor
    """Raw convolution inputs: W - 1 before the step, then those of the step; the buffer is the slot's parity."""
    rec_decay_2LNRhD: Tensor
    """fp32, decay of each token that the step fed."""
    rec_key_2LNRhD: Tensor
    """fp32, its normalised key."""
    rec_update_2LNRhV: Tensor
    """fp32, what it added to the state along that key."""

    def by_slot(self) -> list[Tensor]:
        """Views of all fields with the slots first."""
        doubled = (self.conv_window_2LNwX, self.rec_decay_2LNRhD, self.rec_key_2LNRhD, self.rec_update_2LNRhV)
        return [self.state_LNhVD.transpose(0, 1), *(tensor.movedim(2, 0) for tensor in doubled)]


@dataclass
class SlotState:
    """Per slot: the sequence, and the settings of the request that owns it."""

    block_table_NM: Tensor
    """int32, the scratch block where nothing is assigned."""
    count: Tensor
    """int32, committed tokens that the states do not cover yet."""
    parity: Tensor
    """int32, which of the two buffers holds them."""
    position: Tensor
    """int32, committed tokens P: the pending token's position."""
    pending: Tensor
    """int64, the token that is sampled but in no cache."""
    mtp_hidden_NH: Tensor
    """The MTP layer's hidden state at position P - 1; [N+1, 0] when K = 0."""
    temperature: Tensor
    """fp32; 0 = greedy."""
    top_k: Tensor
    """int32; 0 = all."""
    top_p: Tensor
    """fp32."""
    min_new: Tensor
    """int32, response tokens before a stop token may be drawn."""
    max_new: Tensor
    """int32, longest response."""
    generated: Tensor
    """int32, response tokens so far, the pending one included."""
    finished: Tensor
    """bool."""
    error: Tensor
    """bool, a logit of the row was not finite."""
    stop_ids_Nx: Tensor
    """int32, -1 where unused."""
    suppress_ids_Nx: Tensor
    """int32, -1 where unused."""
    prompt_index: Tensor
    """int32, part of the noise key."""
    sample_index: Tensor
    """int32, part of the noise key."""
    rollout_step: Tensor
    """int32, part of the noise key: the rollout that the request began in."""
    seed: Tensor
    """int64, part of the noise key."""


_NUMBERS = tuple({"stop_ids": "stop_ids_Nx", "suppress_ids": "suppress_ids_Nx"}.get(x, x) for x in SlotNumbers._fields)
_SEQUENCE = ("block_table_NM", "count", "parity", "position", "pending", "mtp_hidden_NH")


class RolloutMemory:
    """Owns every tensor of a rollout: `latents`, `kda`, `slots`. Nobody else may keep one of them."""

    def __init__(self, plan: MemoryPlan, device: torch.device) -> None:
        self.plan = plan
        self.device = device
        self.live_blocks = plan.max_blocks
        """Host-known bound on the blocks of any sequence; a smaller one saves an eager step work."""
        cache = (plan.n_mla, plan.n_blocks + 1, plan.block_tokens, plan.latent_dim)
        self.latents_LBbx = torch.zeros(cache, dtype=plan.dtype, device=device)
        """Normalised latent | rotated key of each position, per MLA layer."""
        self.rope_P: Tensor | None = None
        """Rotations of all positions, left by the first program: graphs hold its address as that of all else here."""
        rows = plan.n_slots + 1
        self.kda = KdaMemory(*(torch.zeros(s, dtype=d, device=device) for s, d in plan.kda_shapes(rows)))
        self.slots = SlotState(*(torch.zeros(s, dtype=d, device=device) for s, d in plan.slot_shapes(rows)))
        self.slots.block_table_NM.fill_(self.scratch_block)
        self.slots.stop_ids_Nx.fill_(-1)
        self.slots.suppress_ids_Nx.fill_(-1)
        self.slots.top_p.fill_(1.0)

    @property
    def scratch_slot(self) -> int:
        return self.plan.n_slots

    @property
    def scratch_block(self) -> int:
        return self.plan.n_blocks

    def tensors(self) -> list[Tensor]:
        """Every tensor owned."""
        rope = [] if self.rope_P is None else [self.rope_P]
        return [self.latents_LBbx, *rope, *vars(self.kda).values(), *vars(self.slots).values()]

    def release(self) -> None:
        """Give all memory back; the object is then of no more use."""
        del self.latents_LBbx, self.rope_P, self.kda, self.slots

    def reset_slot(self, slot: int) -> None:
        """Forget the sequence and the request of a slot. Its blocks are not touched."""
        for by_slot in self.kda.by_slot():
            by_slot[slot].zero_()
        for name, tensor in vars(self.slots).items():
            # Filled in place, as in commit: an assigned number would wait for the device.
            tensor[slot].fill_(_EMPTY.get(name, 0))
        self.slots.block_table_NM[slot].fill_(self.scratch_block)

    def copy_slots(self, source_m: Tensor, target_m: Tensor) -> None:
        """Copy sequences: states, windows, records, block tables and numbers, but no request settings.

        Index tensors; no target may be a source of the same call. Blocks are then shared: the one that
        position P lies in must be replaced before either sequence goes on (copy_block).
        """
        for by_slot in self.kda.by_slot():
            by_slot[target_m] = by_slot[source_m]
        for name in _SEQUENCE:
            tensor = getattr(self.slots, name)
            tensor[target_m] = tensor[source_m]

    def copy_block(self, source: int, target: int) -> None:
        """Copy the rows of one block to another, in every latent cache."""
        self.latents_LBbx[:, target] = self.latents_LBbx[:, source]

    def commit(self, slots_n: Tensor, n_committed_n: Tensor) -> None:
        """Accept the first n_committed of the tokens that the step fed to each of its rows (0 is allowed).

        Called once per step, after all layers ran. Slots are distinct but for the scratch slot, which stays
        an empty sequence.
        """
        state = self.slots
        commit(state.count, state.parity, state.position, slots_n.long(), n_committed_n, self.scratch_slot)

    def numbers(self) -> SlotNumbers:
        """What the rows of a step read of their slots."""
        return SlotNumbers(*(getattr(self.slots, name) for name in _NUMBERS))

    def book(self) -> Book:
        """What a step enters in its slots once it is decided."""
        state = self.slots
        return Book(state.pending, state.generated, state.max_new, state.error, state.finished, state.stop_ids_Nx)


_EMPTY = {"stop_ids_Nx": -1, "suppress_ids_Nx": -1, "top_p": 1.0}
