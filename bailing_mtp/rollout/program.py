"""The rollout's own forward passes, on the trainer's weights and the rollout's memory.

A sequence in a slot has P = memory.slots.position committed tokens, at positions 0 .. P-1. The order of calls:

  prefill (and mtp_prefill), in chunks if need be      sets P, count = 0, parity = 0 of its slots
  mtp_row                                              MTP hidden state at P-1, from h_{P-1} and the next token
  each step:
    mtp_step, offsets 1 .. k-1                         draft chain at positions P-1+offset
    verify                                             trunk over S tokens at P .. P+S-1
    mtp_refresh                                        MTP layer over the same positions; before the commit
    memory.commit                                      P += committed, once per step

Inside a step nothing depends on data on the host: shapes follow from (rows, S), per-row state is read from
memory by slot. Padded rows name the scratch slot. Positions past the last block of the longest sequence, and
those whose block is not assigned, write to the scratch block. The program neither reads nor writes `pending`
and `mtp_hidden`. A prefill may continue a prefill but not a sequence that has taken a step since.

With ep > tp all ranks of an expert-parallel group make the same calls with the same shapes (a prefill: the
same number of tokens; a segment on the scratch slot pads it).

Shape legend: n rows of a step, S tokens fed to each, R = n * S, T tokens of a prefill, m rows of a call,
H hidden size, v this rank's vocabulary rows, M blocks of a table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from bailing_mtp.kernels.reference import decode
from bailing_mtp.kernels.reference import prefill as prefill_twins
from bailing_mtp.parallel import vocab
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.rollout.compute import Compute, ExpertLayout, Mix, Stream, TpSums
from bailing_mtp.rollout.kda import DeltaAttention
from bailing_mtp.rollout.memory import RolloutMemory
from bailing_mtp.rollout.mla import LatentAttention, Placement, Prefixes
from bailing_mtp.rollout.prefill import PrefillPlan
from bailing_mtp.rollout.routes import RouteFormat, RouteRecord
from bailing_mtp.weights.view import KdaWeights, LayerWeights, MtpWeights, WeightsView

LayerMix = Callable[[LayerWeights, int, Tensor], Tensor]
"""(layer, its number among the layers of its kind, normalised input) -> this rank's part of the output."""


class Program:
    """Forward passes of one rank.

    kernels: what steps call, with the names of kernels.reference.decode; prefill_kernels: what prefills call
    instead, with the names of kernels.reference.prefill. Nothing of `memory` is kept but itself.
    records_routes: whether `new_record` gives a record of the trunk's chosen experts to hand to a pass. peers: as
    Compute.peers.
    """

    def __init__(
        self,
        view: WeightsView,
        memory: RolloutMemory,
        context: ParallelContext,
        kernels: ModuleType = decode,
        prefill_kernels: ModuleType = prefill_twins,
        records_routes: bool = False,
        peers: TpSums | None = None,
    ) -> None:
        self.view, self.memory, self.context, self.kernels = view, memory, context, kernels
        self.compute = Compute(view.arch, context, kernels, ExpertLayout.of(context), kernels.experts, peers)
        self.prefill_compute = replace(self.compute, run_experts=prefill_kernels.experts)
        self.delta = DeltaAttention(view.arch, kernels, prefill_kernels)
        self.latent = LatentAttention(view.arch, kernels, prefill_kernels)
        self._indexed = _with_cache_index(view.layers)
        self.route_format = RouteFormat.of(view.arch) if records_routes else None
        if memory.rope_P is None:
            position_P = torch.arange(memory.plan.capacity_tokens, device=memory.device)
            memory.rope_P = kernels.rope_table(position_P, view.arch.qk_rope_head_dim, view.arch.rope_theta)

    def new_record(self) -> RouteRecord | None:
        """An empty record for one pass of the trunk, None where routes are not recorded."""
        return None if self.route_format is None else RouteRecord(self.route_format.dtype)

    def prefill(self, plan: PrefillPlan, token_ids_T: Tensor, record: RouteRecord | None = None) -> Tensor:
        """Bring the plan's tokens into the caches: trunk hidden states after the final norm, [T, H]."""
        at, prefixes = self._prefill_placement(plan, plan.position_T), self._prefixes(plan)
        memory = self.memory

        def mix(layer: LayerWeights, index: int, x_TH: Tensor) -> Tensor:
            if isinstance(layer.mixer, KdaWeights):
                return self.delta.prefill(layer.mixer, x_TH, memory.kda, index, plan)
            return self.latent.prefill(layer.mixer, x_TH, at, memory.latents_LBbx[index], prefixes)

        hidden_TH = self._trunk(token_ids_T, mix, self.prefill_compute, record)
        slots = memory.slots
        slots.position[plan.slots_s] = plan.ends_s.to(torch.int32)
        slots.count.index_fill_(0, plan.slots_s, 0)
        slots.parity.index_fill_(0, plan.slots_s, 0)
        slots.position[memory.scratch_slot].zero_()
        return hidden_TH

    def mtp_prefill(
        self, plan: PrefillPlan, next_ids_T: Tensor, hidden_TH: Tensor, known_T: Tensor
    ) -> None:
        """Write the MTP layer's cache rows from the trunk's hidden states and the token after each.

        known_T: bool, False where that token is not known yet (the last prompt position): no row is written.
        One layer's rows depend on its input alone, so that nothing attends here.
        """
        mtp = self._mtp()
        nowhere = self.memory.plan.capacity_tokens
        at = self._prefill_placement(plan, torch.where(known_T, plan.position_T, nowhere))
        x_TH = self.compute.norm(self._mtp_input(next_ids_T, hidden_TH), mtp.layer.input_norm_H)
        self.latent.write(mtp.layer.mixer, x_TH, at, self.memory.latents_LBbx[-1])

    def logits(self, hidden_XH: Tensor, out_Xv: Tensor | None = None) -> Tensor:
        """Logits of this rank's vocabulary rows, [..., v] in fp32; written to `out_Xv` where one is given."""
        out_Rv = None if out_Xv is None else out_Xv.flatten(0, -2)
        logits_Xv = self.compute.logits(hidden_XH.flatten(0, -2), self.view.head_vH, out_Rv)
        return logits_Xv.unflatten(0, hidden_XH.shape[:-1])

    def empty_logits(self, *shape: int) -> Tensor:
        """Room for logits, [*shape, v]."""
        head_vH = self.view.head_vH
        return torch.empty(*shape, head_vH.shape[0], dtype=vocab.wide(head_vH), device=head_vH.device)

    def verify(self, fed_nS: Tensor, slots_n: Tensor, record: RouteRecord | None = None) -> Tensor:
        """Trunk over S tokens per row at positions P .. P+S-1: hidden states after the final norm, [n, S, H]."""
        n_tokens = fed_nS.shape[1]
        assert n_tokens <= self.memory.plan.records, f"{n_tokens} tokens, records for {self.memory.plan.records}"
        rows = _StepRows(self, slots_n, 0, n_tokens)
        return self._trunk(fed_nS.flatten(), rows.mix, self.compute, record).unflatten(0, fed_nS.shape)

    def mtp_refresh(self, tokens_nS: Tensor, hidden_nSH: Tensor, slots_n: Tensor) -> Tensor:
        """MTP layer over positions P .. P+S-1, [n, S, H]: the trunk's hidden state there, and the token after.

        Overwrites what the draft chain cached. Called after verify and before the commit.
        """
        rows = _StepRows(self, slots_n, 0, tokens_nS.shape[1])
        hidden_RH = self._mtp_rows(tokens_nS.flatten(), hidden_nSH.flatten(0, 1), rows)
        return hidden_RH.unflatten(0, tokens_nS.shape)

    def mtp_step(self, tokens_n: Tensor, hidden_nH: Tensor, offset: int, slots_n: Tensor) -> Tensor:
        """MTP layer at position P-1+offset of each row, [n, H].

        Draft i+1 (offset i) reads draft i and the layer's own output at the position before.
        """
        return self._mtp_rows(tokens_n, hidden_nH, _StepRows(self, slots_n, offset - 1, 1))

    def mtp_row(self, tokens_m: Tensor, hidden_mH: Tensor, slots_m: Tensor) -> Tensor:
        """MTP layer at position P-1, [m, H], from the trunk's hidden state there and the first token after."""
        return self.mtp_step(tokens_m, hidden_mH, 0, slots_m)

    def _trunk(self, token_ids_R: Tensor, mix: LayerMix, compute: Compute, record: RouteRecord | None) -> Tensor:
        self.view.require_current()
        at = Stream(compute.embed(token_ids_R, self.view.embedding_vH))
        for layer, index in self._indexed:
            at = compute.layer(layer, at, partial(mix, layer, index), record)
        return compute.joined(at, self.view.final_norm_H)[1]

    def _mtp_rows(self, tokens_R: Tensor, hidden_RH: Tensor, rows: _StepRows) -> Tensor:
        mtp = self._mtp()
        last = self.memory.plan.n_mla - 1
        mix: Mix = partial(rows.mix, mtp.layer, last)
        at = self.compute.layer(mtp.layer, Stream(self._mtp_input(tokens_R, hidden_RH)), mix)
        return self.compute.joined(at, mtp.final_norm_H)[1]

    def _mtp_input(self, tokens_R: Tensor, hidden_RH: Tensor) -> Tensor:
        mtp, embedded_RH = self._mtp(), self.compute.embed(tokens_R, self.view.embedding_vH)
        both_R2H = self.kernels.norm_pair(
            embedded_RH, mtp.enorm_H, hidden_RH, mtp.hnorm_H, self.view.arch.rms_norm_eps
        )
        return self.kernels.linear(both_R2H, mtp.eh_proj_H2H)

    def _mtp(self) -> MtpWeights:
        assert self.view.mtp is not None and self.memory.plan.speculative_tokens > 0, "no MTP layer here"
        return self.view.mtp

    def _prefill_placement(self, plan: PrefillPlan, write_position_T: Tensor) -> Placement:
        arch = self.view.arch
        table = self.kernels.rope_table(plan.position_T, arch.qk_rope_head_dim, arch.rope_theta)
        return Placement(table, write_position_T, self.memory.slots.block_table_NM[plan.slot_T])

    def _prefixes(self, plan: PrefillPlan) -> Prefixes:
        block_tokens = self.memory.plan.block_tokens
        table_NM = self.memory.slots.block_table_NM
        block_X = table_NM[plan.key_slot_X, plan.key_position_X // block_tokens].long()
        return Prefixes(plan.pack, block_X, plan.key_position_X % block_tokens)


class _StepRows:
    """Positions, block tables and mixers of the rows of one pass of a step."""

    def __init__(self, program: Program, slots_n: Tensor, offset: int, n_tokens: int) -> None:
        self.program, self.n_tokens = program, n_tokens
        self.slots_n = slots_n.long()
        slots, live_blocks = program.memory.slots, program.memory.live_blocks
        # The scratch slot has no position before its first.
        self.position_n, self.block_table_nM = program.kernels.step_rows(
            slots.position, slots.block_table_NM[:, :live_blocks], self.slots_n, offset
        )

    def mix(self, layer: LayerWeights, index: int, x_RH: Tensor) -> Tensor:
        memory = self.program.memory
        if isinstance(layer.mixer, KdaWeights):
            return self.program.delta.step(
                layer.mixer, x_RH, memory.kda, memory.slots, index, self.slots_n, self.n_tokens
            )
        return self.program.latent.step(
            layer.mixer,
            x_RH,
            memory.rope_P,
            memory.latents_LBbx[index],
            self.block_table_nM,
            self.position_n,
        )


def _with_cache_index(layers: tuple[LayerWeights, ...]) -> tuple[tuple[LayerWeights, int], ...]:
    """Each layer with its number among the layers of its kind."""
    seen: dict[str, int] = {}
    indexed = []
    for layer in layers:
        index = seen.get(layer.plan.mixer, 0)
        seen[layer.plan.mixer] = index + 1
        indexed.append((layer, index))
    return tuple(indexed)
