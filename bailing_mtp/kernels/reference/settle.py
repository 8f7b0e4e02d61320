"""What a step reads of its slots and leaves in them, in plain torch.

Shape legend: N slots, n rows, S tokens of a block, X ids of a list, H hidden size, W words of a packed row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

RUNNING, STOP, LENGTH = 0, 1, 2
"""States of a row after a block."""


class SlotNumbers(NamedTuple):
    """Per slot, or gathered per row: how it is drawn, and where it stands."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_new: Tensor
    generated: Tensor
    stop_ids: Tensor
    """[., X]."""
    suppress_ids: Tensor
    """[., X]."""
    seed: Tensor
    rollout_step: Tensor
    prompt_index: Tensor
    sample_index: Tensor
    position: Tensor
    pending: Tensor
    finished: Tensor


class Book(NamedTuple):
    """What `settle` reads and writes, per slot."""

    pending_N: Tensor
    generated_N: Tensor
    max_new_N: Tensor
    error_N: Tensor
    finished_N: Tensor
    stop_ids_NX: Tensor


class Cut(NamedTuple):
    """What is kept of a block."""

    kept_n: Tensor
    """int64, tokens kept, 0..S."""
    state_n: Tensor
    """int64: RUNNING, STOP or LENGTH."""


WHOLE = ("seed", "rollout_step", "prompt_index", "sample_index", "position", "pending")
"""Numbers that are int64 once they are read."""


def read_slots(slots: SlotNumbers, slots_n: Tensor) -> SlotNumbers:
    """The numbers of the rows' slots."""
    rows = SlotNumbers(*(field[slots_n] for field in slots))
    return rows._replace(**{name: getattr(rows, name).long() for name in WHOLE})


def cut_block(tokens_nS: Tensor, n_tokens_n: Tensor, stop_ids_nX: Tensor, room_n: Tensor) -> Cut:
    """Cut each row's first `n_tokens` tokens after its first stop id (which stays), and at `room` tokens.

    room_n: response tokens that the row may still add. A stop id inside the room wins over the cap.
    stop_ids_nX: -1 padded.
    """
    columns = torch.arange(tokens_nS.shape[1], device=tokens_nS.device)
    is_stop_nS = (tokens_nS.unsqueeze(-1) == stop_ids_nX.unsqueeze(1)).any(-1)
    stops_before_nS = is_stop_nS.long().cumsum(-1) - is_stop_nS.long()
    room_n1 = room_n.unsqueeze(-1)
    keep_nS = (columns < n_tokens_n.unsqueeze(-1)) & (stops_before_nS == 0) & (columns < room_n1)
    kept_n = keep_nS.sum(-1)
    stopped_n = (keep_nS & is_stop_nS).any(-1)
    full_n = kept_n >= room_n
    state_n = torch.where(stopped_n, STOP, torch.where(full_n, LENGTH, RUNNING))
    return Cut(kept_n, state_n)


def settle(
    tokens_nS: Tensor,
    n_accepted_n: Tensor,
    log_probs_3nS: Tensor,
    finite_nS: Tensor,
    known_n: Tensor | None,
    book: Book,
    slots_n: Tensor,
    packed_nW: Tensor,
) -> Tensor:
    """Cut each row's block, enter it in the book of its slot, and pack it for the host.

    log_probs_3nS: fp32, raw, processed, kept mass. finite_nS: bool, False where a token was drawn from logits that
    are not finite: it and later ones are not kept, and the row ends with an error if the cut kept one. known_n:
    int64, the pending token of a row that has one already: it gains nothing; -1 elsewhere. packed_nW: int32, out:
    tokens, kept, accepted, state, error (0 or 1); then the bits of the three log-probabilities, 4 * S + 4 words in all;
    later ones are left alone.

    Returns the fed tokens to commit, int64 [n]: n_accepted + 1, but 0 of a row that has ended, so that it stays
    inside its context while steps already under way name it.
    """
    was_finished_n = book.finished_N[slots_n]
    room_n = (book.max_new_N[slots_n] - book.generated_N[slots_n]).masked_fill(was_finished_n, 0)
    kept_n, state_n = cut_block(tokens_nS, n_accepted_n + 1, book.stop_ids_NX[slots_n], room_n)
    n_finite_n = finite_nS.long().cumprod(-1).sum(-1)
    error_n, kept_n = n_finite_n < kept_n, torch.minimum(kept_n, n_finite_n)
    # Later columns repeat the fresh token.
    pending_n = tokens_nS[:, -1]
    if known_n is not None:
        is_known_n = known_n >= 0
        pending_n = torch.where(is_known_n, known_n, pending_n)
        kept_n, state_n = kept_n.masked_fill(is_known_n, 0), state_n.masked_fill(is_known_n, RUNNING)
        error_n = error_n & ~is_known_n
    finished_n = was_finished_n | (state_n != RUNNING) | error_n
    book.pending_N[slots_n] = pending_n
    book.generated_N[slots_n] = book.generated_N[slots_n] + kept_n.to(torch.int32)
    book.error_N[slots_n] = book.error_N[slots_n] | error_n
    book.finished_N[slots_n] = finished_n
    numbers_n4 = torch.stack([kept_n, n_accepted_n, state_n, error_n.long()], 1)
    bits = torch.cat(list(log_probs_3nS), dim=1).view(torch.int32)
    packed = torch.cat([tokens_nS.to(torch.int32), numbers_n4.to(torch.int32), bits], dim=1)
    packed_nW[:, : packed.shape[1]] = packed
    return (n_accepted_n + 1).masked_fill(finished_n, 0)


def commit(
    count_N: Tensor, parity_N: Tensor, position_N: Tensor, slots_n: Tensor, n_committed_n: Tensor, scratch_slot: int
) -> None:
    """Accept the first n_committed of the tokens that a step fed: the states do not cover them yet (count), their
    records lie in the other buffer (parity), and the sequence is longer (position). The scratch slot stays empty."""
    n_committed_n = n_committed_n.to(torch.int32)
    count_N[slots_n] = n_committed_n
    parity_N[slots_n] = 1 - parity_N[slots_n]
    position_N[slots_n] = position_N[slots_n] + n_committed_n
    for tensor_N in (count_N, parity_N, position_N):
        # Filled in place: an assigned number would be copied from the host, which a capture refuses.
        tensor_N[scratch_slot].zero_()


def keep_hidden(hidden_NH: Tensor, hidden_nSH: Tensor, column_n: Tensor, slots_n: Tensor) -> None:
    """hidden_NH[slots] = the given column of each row."""
    row_n = torch.arange(len(slots_n), device=slots_n.device)
    hidden_NH[slots_n] = hidden_nSH[row_n, column_n]
