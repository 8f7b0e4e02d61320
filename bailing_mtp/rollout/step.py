"""One decode step: draft, verify, accept, refresh, commit.

The refresh comes before the commit, because both passes stand at positions P .. P + k of the old P. Shapes follow
from (rows, k) alone and nothing is read back to the host.

Shapes: n rows, k drafts, S = k + 1 fed tokens, m rows of a first step, H hidden size, v this rank's vocabulary,
L expert layers of the trunk, e experts per token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bailing_mtp.rollout.accept import Accepted, TokenLogProbs, no_drafts
from bailing_mtp.rollout.draft import Drafter
from bailing_mtp.rollout.memory import RolloutMemory
from bailing_mtp.rollout.program import Program
from bailing_mtp.rollout.rows import StepRows
from bailing_mtp.rollout.sampling import Verdict, judge
from bailing_mtp.rollout.stops import RUNNING, Cut, cut_block


class StepOutput(NamedTuple):
    """What a step gives the host. Column j of a row counts only if j < kept."""

    tokens_nS: Tensor
    """int64."""
    kept_n: Tensor
    """int64, response tokens that the row gained."""
    n_accepted_n: Tensor
    """int64, drafts accepted, cut or not."""
    state_n: Tensor
    """int64, one of stops.RUNNING, STOP, LENGTH."""
    error_n: Tensor
    """bool: the logits after the last kept token were not finite."""
    log_probs: TokenLogProbs
    routes_nSLe: Tensor | None = None
    """Experts of the fed tokens, the pending one first; column j was committed if j <= n_accepted. None: not
    recorded."""


def decode_step(program: Program, memory: RolloutMemory, drafter: Drafter, rows: StepRows, k: int) -> StepOutput:
    """Advance every row by the drafts that it accepts and one fresh token.

    With a memory for K > 0 drafts the MTP layer is refreshed also when k = 0, so that any k may follow; with
    K = 0 there is no MTP work. A row that had ended before keeps and commits nothing.
    """
    state, slots_n = memory.slots, rows.slots_n
    pending_n1 = state.pending[slots_n].unsqueeze(-1)
    drafts = drafter.draft(program, memory, rows, k) if k else None
    fed_nS = pending_n1 if drafts is None else torch.cat([pending_n1, drafts.tokens_nk], dim=-1)
    record = program.new_record()
    hidden_nSH = program.verify(fed_nS, slots_n, record)
    logits_rv = program.logits(hidden_nSH).flatten(0, 1)
    if drafts is None:
        drafts = no_drafts(len(slots_n), logits_rv.shape[-1], logits_rv.device)
    verdict = judge(program.kernels, logits_rv, drafts, rows, rows.position_n)
    accepted = verdict.accepted
    output = _output(memory, rows, verdict)
    if memory.plan.speculative_tokens:
        refreshed_nSH = program.mtp_refresh(accepted.tokens_nS, hidden_nSH, slots_n)
        row_n = torch.arange(len(slots_n), device=slots_n.device)
        state.mtp_hidden_NH[slots_n] = refreshed_nSH[row_n, accepted.n_accepted_n]
    _remember(memory, rows, output, accepted.tokens_nS[:, -1])
    # A row that has ended commits nothing, so that it stays inside its context while steps already under way name it.
    memory.commit(slots_n, (accepted.n_accepted_n + 1).masked_fill(state.finished[slots_n], 0))
    return output if record is None else output._replace(routes_nSLe=record.routes().unflatten(0, fed_nS.shape))


def first_step(
    program: Program, memory: RolloutMemory, rows: StepRows, hidden_mH: Tensor, known_m: Tensor
) -> StepOutput:
    """Start rows whose P tokens were just prefilled: draw the token at P, and rebuild the MTP layer's row P - 1.

    hidden_mH: trunk hidden state at P - 1. known_m: int64, the pending token of a row that continues after a
    preemption (it is kept, never drawn again), -1 for a row that begins.
    """
    logits_mv = program.logits(hidden_mH)
    drafts = no_drafts(len(known_m), logits_mv.shape[-1], logits_mv.device)
    verdict = judge(program.kernels, logits_mv, drafts, rows, rows.position_n - 1)
    is_new_m = known_m < 0
    token_m = torch.where(is_new_m, verdict.accepted.tokens_nS[:, 0], known_m)
    output = _output(memory, rows, verdict)
    output = output._replace(
        kept_n=torch.where(is_new_m, output.kept_n, 0),
        state_n=torch.where(is_new_m, output.state_n, RUNNING),
        error_n=output.error_n & is_new_m,
    )
    if memory.plan.speculative_tokens:
        memory.slots.mtp_hidden_NH[rows.slots_n] = program.mtp_row(token_m, hidden_mH, rows.slots_n)
    _remember(memory, rows, output, token_m)
    return output


def _output(memory: RolloutMemory, rows: StepRows, verdict: Verdict) -> StepOutput:
    """Cut the block, and find rows that would keep a token drawn from logits that are not finite."""
    n_accepted_n, tokens_nS = verdict.accepted
    cut = _cut(memory, rows, verdict.accepted)
    n_finite_n = verdict.finite_nS.long().cumprod(-1).sum(-1)
    error_n = n_finite_n < cut.kept_n
    kept_n = torch.minimum(cut.kept_n, n_finite_n)
    return StepOutput(tokens_nS, kept_n, n_accepted_n, cut.state_n, error_n, verdict.log_probs)


def _cut(memory: RolloutMemory, rows: StepRows, accepted: Accepted) -> Cut:
    state, slots_n = memory.slots, rows.slots_n
    room_n = (state.max_new[slots_n] - state.generated[slots_n]).masked_fill(rows.finished_n, 0)
    return cut_block(accepted.tokens_nS, accepted.n_accepted_n + 1, rows.settings.stop_ids, room_n)


def _remember(memory: RolloutMemory, rows: StepRows, output: StepOutput, pending_n: Tensor) -> None:
    state, slots_n = memory.slots, rows.slots_n
    state.pending[slots_n] = pending_n
    state.generated[slots_n] = state.generated[slots_n] + output.kept_n.to(torch.int32)
    state.error[slots_n] = state.error[slots_n] | output.error_n
    state.finished[slots_n] = rows.finished_n | (output.state_n != RUNNING) | output.error_n
