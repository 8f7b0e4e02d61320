"""What the rungs of the correctness ladder share: a cut of Ling-3.0-tiny with random weights, and a program on it.

Shapes: n rows, S tokens of each, T tokens of a pack, H hidden size, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bailing_mtp.config import RolloutConfig
from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.contracts.batch import PackedLayout, TokenBatch
from bailing_mtp.contracts.clock import WeightsClock
from bailing_mtp.contracts.samples import Prompt, Sample, SamplingParams
from bailing_mtp.kernels.reference import decode as twins
from bailing_mtp.model.build import BuiltModel, build_model
from bailing_mtp.model.settings import ModelSettings
from bailing_mtp.parallel.collectives import all_gather
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.rollout.accept import Drafts
from bailing_mtp.rollout.engine import RolloutEngine
from bailing_mtp.rollout.memory import MemoryPlan, RolloutMemory
from bailing_mtp.rollout.prefill import PrefillPlan, prefill_kernels
from bailing_mtp.rollout.program import Program
from bailing_mtp.rollout.rows import StepRows
from bailing_mtp.weights.view import publish
from tests.distributed.worlds import shard_of
from tests.model.test_presets import preset
from tests.rollout.blocks import assign_blocks

CUT = {"num_hidden_layers": 4, "vocab_size": 4096, "num_experts": 32}


def random_model(arch: Architecture, dtype: torch.dtype, context: ParallelContext, seed: int = 3) -> BuiltModel:
    """The same weights in every dtype, up to its rounding. Embeddings are of size 1, so that a token whose router
    flips does not become another one altogether."""
    built = build_model(arch, ModelSettings(dtype, dtype), context, with_mtp=True)
    generator = torch.Generator(context.device).manual_seed(seed)
    with torch.no_grad():
        for module in built.modules:
            module.eval()
            for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
                if tensor.is_floating_point():
                    noise = torch.randn(tensor.shape, generator=generator, device=context.device)
                    scale = tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 0.2
                    scale = 1.0 if name.startswith("embedding") else scale
                    tensor.copy_(noise * scale + (1.0 if "norm" in name else 0.0))
    return built


def random_ids(n: int, vocab: int, seed: int) -> Tensor:
    return torch.randint(0, vocab, (n,), generator=torch.Generator().manual_seed(seed))


def kl(expected_XV: Tensor, ours_XV: Tensor) -> Tensor:
    """KL(expected || ours) of each row, in fp64."""
    p, q = expected_XV.double().log_softmax(-1), ours_XV.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


@dataclass
class Rig:
    """A program without an engine: every sequence has its slot and its blocks from the start."""

    built: BuiltModel
    program: Program
    memory: RolloutMemory

    @staticmethod
    def make(built: BuiltModel, context: ParallelContext, kernels: str, slots: int, context_tokens: int) -> Rig:
        """Room for two drafts; NaN where nothing promises a value."""
        dtype = next(built.trunk.parameters()).dtype
        shard = shard_of(context)
        plan = MemoryPlan.build(built.trunk.arch, shard, 2, slots, 0, context_tokens, 64, dtype)
        memory = RolloutMemory(plan, context.device)
        blocks = torch.randperm(plan.n_blocks, generator=torch.Generator().manual_seed(0)).tolist()
        for slot in range(slots):
            assign_blocks(memory, slot, 0, blocks[slot * plan.max_blocks : (slot + 1) * plan.max_blocks])
        for tensor in (memory.latents_LBbx, *vars(memory.kda).values()):
            tensor.fill_(torch.nan)
        sets = (twins, prefill_kernels("torch", dtype))
        if kernels == "triton":
            from bailing_mtp.kernels.triton import decode

            sets = (decode, prefill_kernels("triton", dtype))
        view = publish(built.trunk, built.mtp, shard, WeightsClock())
        return Rig(built, Program(view, memory, context, *sets), memory)

    @torch.no_grad()
    def prefill(self, sequences: Sequence[Tensor], first_slot: int = 0, with_mtp: bool = False) -> list[Tensor]:
        """Sequence i into slot first_slot + i; hidden states of each. MTP rows of all positions but the last."""
        device = self.memory.device
        plan = PrefillPlan.build([(first_slot + i, 0, len(ids)) for i, ids in enumerate(sequences)], device)
        hidden_TH = self.program.prefill(plan, torch.cat(list(sequences)).to(device))
        if with_mtp:
            following = torch.cat([ids.roll(-1) for ids in sequences]).to(device)
            known = torch.cat([torch.arange(len(ids)) < len(ids) - 1 for ids in sequences]).to(device)
            self.program.mtp_prefill(plan, following, hidden_TH, known)
        return list(hidden_TH.split([len(ids) for ids in sequences]))

    def commit(self, slots_n: Tensor, tokens: int | Tensor) -> None:
        count_n = torch.full_like(slots_n, tokens) if isinstance(tokens, int) else tokens
        self.memory.commit(slots_n, count_n)

    @torch.no_grad()
    def step(self, fed_nS: Tensor, slots_n: Tensor) -> Tensor:
        """Logits [n, S, V] in fp32; nothing is committed."""
        return self.logits(self.program.verify(fed_nS.to(self.memory.device), slots_n))

    @torch.no_grad()
    def logits(self, hidden_XH: Tensor) -> Tensor:
        context, logits_Xv = self.program.context, self.program.logits(hidden_XH)
        return logits_Xv if context.tp == 1 else torch.cat(all_gather(logits_Xv, context.tp_group).unbind(0), -1)

    def decode(self, documents: Sequence[Tensor], S: int) -> Tensor:
        """Logits [T, V] of whole documents, on the host: all but the first token of each in steps of S; they end at
        their own times."""
        device = self.memory.device
        found = [[self.logits(states)] for states in self.prefill([ids[:1] for ids in documents])]
        done = [1] * len(documents)
        while live := [i for i, ids in enumerate(documents) if done[i] < len(ids)]:
            slots_n = torch.tensor(live, device=device)
            fed = [documents[i][done[i] : done[i] + S] for i in live]
            padded_nS = torch.stack([torch.nn.functional.pad(ids, (0, S - len(ids))) for ids in fed])
            logits_nSV = self.step(padded_nS, slots_n)
            self.commit(slots_n, torch.tensor([len(ids) for ids in fed], device=device))
            for row, (i, ids) in enumerate(zip(live, fed, strict=True)):
                found[i].append(logits_nSV[row, : len(ids)])
                done[i] += len(ids)
        return torch.cat([torch.cat(parts) for parts in found]).cpu()

    @torch.no_grad()
    def trained_depths(self, hidden: Sequence[Tensor], sequences: Sequence[Tensor], depths: int) -> list[Tensor]:
        """Training's unrolled MTP layer at the last site of each document, logits [n, V] of depths 1, 2, ...

        hidden: the trunk's states of each document; sequences: its ids, `depths` more of them.
        """
        trunk, device = self.built.trunk, self.memory.device
        lengths = [len(states) for states in hidden]
        ahead = [
            torch.cat([ids[d : d + n] for ids, n in zip(sequences, lengths, strict=True)]).to(device)
            for d in range(1, depths + 1)
        ]
        layout = TokenBatch(ahead[0], torch.ones_like(ahead[0], dtype=torch.bool), PackedLayout.build(lengths))
        layout = layout.to(device).layout
        outputs = self.built.mtp(
            [trunk.embed(ids) for ids in ahead],
            torch.cat(list(hidden)).unsqueeze(1),
            [trunk.rope(layout.position_ids_T + d) for d in range(depths)],
            layout,
            [layout.padding_T for _ in ahead],
        )
        last_n = torch.tensor(lengths, device=device).cumsum(0) - 1
        return [self.program.logits(out.squeeze(1)[last_n]) for out in outputs]


class OracleDrafter:
    """Proposes known responses, wrong at every third response token; no reads by the host, so it can be captured.

    Its q is a one-hot at the draft.
    """

    def __init__(self, responses: Sequence[Sequence[int]], vocab: int, device: torch.device, room: int = 8) -> None:
        """responses: of prompts 0, 1, ..., all of one length."""
        table = torch.tensor([list(tokens) for tokens in responses], device=device)
        table[:, 2::3] = (table[:, 2::3] + 1) % vocab
        self._table_PX = torch.nn.functional.pad(table, (0, room))
        self._vocab = vocab

    def draft(self, program: Program, memory: RolloutMemory, rows: StepRows, k: int) -> Drafts:
        ahead_k = torch.arange(k, device=memory.device)
        index_nk = rows.settings.response_index.long().unsqueeze(-1) + ahead_k
        prompt_n1 = rows.keys.prompt_index.long().clamp(0, len(self._table_PX) - 1).unsqueeze(-1)
        tokens_nk = self._table_PX[prompt_n1, index_nk.clamp(0, self._table_PX.shape[1] - 1)]
        logits = torch.full((*tokens_nk.shape, self._vocab), -torch.inf, device=memory.device)
        logits.scatter_(-1, tokens_nk.unsqueeze(-1), 0.0)
        return Drafts(tokens_nk, logits, torch.zeros(tokens_nk.shape, device=memory.device))


def make_engine(
    built: BuiltModel,
    context: ParallelContext,
    k: int,
    drafter: object = None,
    tokenizer: object = None,
    clock: WeightsClock | None = None,
    **config: object,
) -> RolloutEngine:
    clock = clock or WeightsClock()
    settings = {"max_running": 32, "keep_memory": True, "kernels": "triton", "cuda_graphs": True} | config
    return RolloutEngine(
        lambda: publish(built.trunk, built.mtp, shard_of(context), clock),
        context,
        RolloutConfig(speculative_tokens=k, **settings),
        tokenizer,
        drafter,
        tell=lambda line: None,
    )


def make_prompts(n: int, vocab: int, sampling: SamplingParams, samples: int = 1) -> list[Prompt]:
    """Of 5 to 35 tokens."""
    return [
        Prompt(
            prompt_ids=tuple(random_ids(5 + 7 * i % 31, vocab, i).tolist()),
            index=i,
            sampling=sampling,
            samples_per_prompt=samples,
        )
        for i in range(n)
    ]


def generate(engine: RolloutEngine, prompts: Sequence[Prompt]) -> list[Sample]:
    """All samples; the memory is given back."""
    found = [sample for group in engine.generate(prompts) for sample in group.samples]
    engine.release()
    return found


def cut(**changes: object) -> Architecture:
    return preset("ling3_tiny", **(CUT | changes))
