"""One decode step: draft, verify, accept, refresh, commit.

The refresh comes before the commit, because both passes stand at positions P .. P + k of the old P. Shapes follow
from (rows, k) alone and nothing is read back to the host: what a step gives it is one packed row per row, laid out as
results.unpack says.

Shapes: n rows, k drafts, S = k + 1 fed tokens, m rows of a first step, H hidden size, W words of a packed row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bailing_mtp.rollout.accept import no_drafts
from bailing_mtp.rollout.draft import Drafter
from bailing_mtp.rollout.memory import RolloutMemory
from bailing_mtp.rollout.program import Program
from bailing_mtp.rollout.routes import pack_routes
from bailing_mtp.rollout.rows import StepRows
from bailing_mtp.rollout.sampling import judge


def decode_step(
    program: Program, memory: RolloutMemory, drafter: Drafter, rows: StepRows, k: int, packed_nW: Tensor
) -> None:
    """Advance every row by the drafts that it accepts and one fresh token; the output goes to `packed_nW`.

    With a memory for K > 0 drafts the MTP layer is refreshed also when k = 0, so that any k may follow; with
    K = 0 there is no MTP work. A row that had ended before keeps and commits nothing. Experts of the fed tokens, the
    pending one first, go along where the program records them.
    """
    kernels, state, slots_n = program.kernels, memory.slots, rows.slots_n
    pending_n1 = rows.pending_n.unsqueeze(-1)
    drafts = drafter.draft(program, memory, rows, k) if k else None
    fed_nS = pending_n1 if drafts is None else torch.cat([pending_n1, drafts.tokens_nk], dim=-1)
    record = program.new_record()
    hidden_nSH = program.verify(fed_nS, slots_n, record)
    logits_nSv = program.logits(hidden_nSH)
    if drafts is None:
        drafts = no_drafts(len(slots_n), logits_nSv.shape[-1], logits_nSv.device)
    verdict = judge(kernels, logits_nSv, drafts, rows, rows.position_n)
    n_committed_n = kernels.settle(*verdict, None, memory.book(), slots_n, packed_nW)
    if record is not None:
        packed_nW[:, 4 * (k + 1) + 4 :] = pack_routes(record.routes().unflatten(0, fed_nS.shape))
    if memory.plan.speculative_tokens:
        refreshed_nSH = program.mtp_refresh(verdict.tokens_nS, hidden_nSH, slots_n)
        kernels.keep_hidden(state.mtp_hidden_NH, refreshed_nSH, verdict.n_accepted_n, slots_n)
    kernels.commit(state.count, state.parity, state.position, slots_n, n_committed_n, memory.scratch_slot)


def first_step(
    program: Program,
    memory: RolloutMemory,
    rows: StepRows,
    hidden_mH: Tensor,
    known_m: Tensor,
    packed_mW: Tensor,
) -> None:
    """Start rows whose P tokens were just prefilled: draw the token at P, and rebuild the MTP layer's row P - 1.

    hidden_mH: trunk hidden state at P - 1. known_m: int64, the pending token of a row that continues after a
    preemption (it is kept, never drawn again), -1 for a row that begins. The output goes to `packed_mW`.
    """
    logits_m1v = program.logits(hidden_mH.unsqueeze(1))
    drafts = no_drafts(len(known_m), logits_m1v.shape[-1], logits_m1v.device)
    verdict = judge(program.kernels, logits_m1v, drafts, rows, rows.position_n - 1)
    program.kernels.settle(*verdict, known_m, memory.book(), rows.slots_n, packed_mW)
    if memory.plan.speculative_tokens:
        token_m = torch.where(known_m < 0, verdict.tokens_nS[:, 0], known_m)
        memory.slots.mtp_hidden_NH[rows.slots_n] = program.mtp_row(token_m, hidden_mH, rows.slots_n)
