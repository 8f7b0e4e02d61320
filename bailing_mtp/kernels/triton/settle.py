"""What a step reads of its slots and leaves in them, one program per row.

Shape legend: as kernels.reference.settle.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bailing_mtp.kernels.reference.settle import LENGTH, RUNNING, STOP, WHOLE, Book, SlotNumbers


@triton.jit
def _copy(out, row, source, slot):
    tl.store(out + row, tl.load(source + slot).to(out.dtype.element_ty))


@triton.jit
def _read_slots(
    temperature_n, top_k_n, top_p_n, min_new_n, generated_n, stops_nX, suppress_nY, seed_n, step_n, prompt_n,
    sample_n, position_n, pending_n, finished_n,
    temperature_N, top_k_N, top_p_N, min_new_N, generated_N, stops_NX, suppress_NY, seed_N, step_N, prompt_N,
    sample_N, position_N, pending_N, finished_N, slots_n,
    X: tl.constexpr, Y: tl.constexpr, X_PAD: tl.constexpr, Y_PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_n + row).to(tl.int64)
    _copy(temperature_n, row, temperature_N, slot)
    _copy(top_k_n, row, top_k_N, slot)
    _copy(top_p_n, row, top_p_N, slot)
    _copy(min_new_n, row, min_new_N, slot)
    _copy(generated_n, row, generated_N, slot)
    _copy(seed_n, row, seed_N, slot)
    _copy(step_n, row, step_N, slot)
    _copy(prompt_n, row, prompt_N, slot)
    _copy(sample_n, row, sample_N, slot)
    _copy(position_n, row, position_N, slot)
    _copy(pending_n, row, pending_N, slot)
    tl.store(finished_n + row, tl.load(finished_N + slot) != 0)
    ids_X, ids_Y = tl.arange(0, X_PAD), tl.arange(0, Y_PAD)
    stops_X = tl.load(stops_NX + slot * X + ids_X, mask=ids_X < X, other=-1)
    tl.store(stops_nX + row * X + ids_X, stops_X, mask=ids_X < X)
    suppress_Y = tl.load(suppress_NY + slot * Y + ids_Y, mask=ids_Y < Y, other=-1)
    tl.store(suppress_nY + row * Y + ids_Y, suppress_Y, mask=ids_Y < Y)


def read_slots(slots: SlotNumbers, slots_n: Tensor) -> SlotNumbers:
    """As kernels.reference.settle.read_slots."""
    n, device = slots_n.shape[0], slots_n.device
    assert slots_n.is_contiguous() and all(field.is_contiguous() for field in slots)
    rows = SlotNumbers(
        *(
            torch.empty(n, *field.shape[1:], dtype=torch.int64 if name in WHOLE else field.dtype, device=device)
            for name, field in slots._asdict().items()
        )
    )
    X, Y = slots.stop_ids.shape[1], slots.suppress_ids.shape[1]
    if n:
        _read_slots[(n,)](
            *rows, *slots, slots_n,
            X=X, Y=Y, X_PAD=triton.next_power_of_2(max(X, 1)), Y_PAD=triton.next_power_of_2(max(Y, 1)), num_warps=1,
        )  # fmt: skip
    return rows


@triton.jit
def _settle(
    n_committed_n, packed_nW, packed_bits_nW, tokens_nS, n_accepted_n, log_probs_3nS, finite_nS, known_n,
    pending_N, generated_N, max_new_N, error_N, finished_N, stop_ids_NX, slots_n,
    W, S: tl.constexpr, X: tl.constexpr, S_PAD: tl.constexpr, X_PAD: tl.constexpr, KNOWN: tl.constexpr,
    RUNNING: tl.constexpr, STOP: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    row, n = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    slot = tl.load(slots_n + row).to(tl.int64)
    ids_S, ids_X = tl.arange(0, S_PAD), tl.arange(0, X_PAD)
    in_S, places = ids_S < S, row * S + ids_S
    token_S = tl.load(tokens_nS + places, mask=in_S, other=-2)
    stop_X = tl.load(stop_ids_NX + slot * X + ids_X, mask=ids_X < X, other=-1)
    is_stop_S = in_S & (tl.max((token_S[:, None] == stop_X[None, :]).to(tl.int32), axis=1) > 0)
    finite_S = tl.load(finite_nS + places, mask=in_S, other=0) != 0
    first_stop = tl.min(tl.where(is_stop_S, ids_S, S), axis=0)
    n_finite = tl.min(tl.where(finite_S, S, ids_S), axis=0)
    was_finished = tl.load(finished_N + slot) != 0
    generated = tl.load(generated_N + slot)
    room = tl.where(was_finished, 0, tl.load(max_new_N + slot) - generated)
    n_accepted = tl.load(n_accepted_n + row).to(tl.int32)
    cut = tl.maximum(tl.minimum(tl.minimum(n_accepted + 1, first_stop + 1), room), 0)
    state = tl.where(first_stop < cut, STOP, tl.where(cut >= room, LENGTH, RUNNING))
    error, kept = n_finite < cut, tl.minimum(cut, n_finite)
    pending = tl.load(tokens_nS + row * S + S - 1)
    if KNOWN:
        known = tl.load(known_n + row)
        is_known = known >= 0
        pending = tl.where(is_known, known, pending)
        kept, state = tl.where(is_known, 0, kept), tl.where(is_known, RUNNING, state)
        error = error & (known < 0)
    finished = was_finished | (state != RUNNING) | error
    had_error = tl.load(error_N + slot) != 0
    # Rows of the scratch slot may pass one another here: nobody reads what it then holds.
    tl.store(pending_N + slot, pending)
    tl.store(generated_N + slot, generated + kept)
    tl.store(error_N + slot, had_error | error)
    tl.store(finished_N + slot, finished)
    tl.store(n_committed_n + row, tl.where(finished, 0, n_accepted + 1).to(tl.int64))
    packed = packed_nW + row * W
    tl.store(packed + ids_S, token_S.to(tl.int32), mask=in_S)
    tl.store(packed + S, kept)
    tl.store(packed + S + 1, n_accepted)
    tl.store(packed + S + 2, state)
    tl.store(packed + S + 3, error.to(tl.int32))
    bits = packed_bits_nW + row * W + S + 4
    for kind in tl.static_range(3):
        x_S = tl.load(log_probs_3nS + kind * n.to(tl.int64) * S + places, mask=in_S, other=0.0)
        tl.store(bits + kind * S + ids_S, x_S, mask=in_S)


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
    """As kernels.reference.settle.settle."""
    (n, S), X = tokens_nS.shape, book.stop_ids_NX.shape[1]
    inputs = (tokens_nS, n_accepted_n, log_probs_3nS, finite_nS, slots_n, packed_nW, *book)
    assert all(x.is_contiguous() for x in inputs) and packed_nW.shape[1] >= 4 * S + 4
    n_committed_n = torch.empty(n, dtype=torch.int64, device=tokens_nS.device)
    if n:
        _settle[(n,)](
            n_committed_n, packed_nW, packed_nW.view(torch.float32), tokens_nS, n_accepted_n, log_probs_3nS,
            finite_nS, tokens_nS if known_n is None else known_n, *book, slots_n,
            packed_nW.shape[1], S=S, X=X, S_PAD=triton.next_power_of_2(S), X_PAD=triton.next_power_of_2(max(X, 1)),
            KNOWN=known_n is not None, RUNNING=RUNNING, STOP=STOP, LENGTH=LENGTH, num_warps=1,
        )  # fmt: skip
    return n_committed_n


@triton.jit
def _commit(count_N, parity_N, position_N, slots_n, n_committed_n, scratch_slot):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_n + row).to(tl.int64)
    is_real = slot != scratch_slot
    n_committed = tl.load(n_committed_n + row).to(tl.int32)
    parity, position = tl.load(parity_N + slot), tl.load(position_N + slot)
    tl.store(count_N + slot, tl.where(is_real, n_committed, 0))
    tl.store(parity_N + slot, tl.where(is_real, 1 - parity, 0))
    tl.store(position_N + slot, tl.where(is_real, position + n_committed, 0))


def commit(
    count_N: Tensor, parity_N: Tensor, position_N: Tensor, slots_n: Tensor, n_committed_n: Tensor, scratch_slot: int
) -> None:
    """As kernels.reference.settle.commit."""
    assert slots_n.is_contiguous() and n_committed_n.is_contiguous()
    if slots_n.shape[0]:
        _commit[(slots_n.shape[0],)](
            count_N, parity_N, position_N, slots_n, n_committed_n, scratch_slot, num_warps=1
        )


@triton.jit
def _keep_hidden(out, hidden, column_n, slots_n, S, H, TILE: tl.constexpr):
    row, ids = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    slot, column = tl.load(slots_n + row).to(tl.int64), tl.load(column_n + row)
    x = tl.load(hidden + (row * S + column) * H + ids, mask=ids < H)
    tl.store(out + slot * H + ids, x, mask=ids < H)


def keep_hidden(hidden_NH: Tensor, hidden_nSH: Tensor, column_n: Tensor, slots_n: Tensor) -> None:
    """As kernels.reference.settle.keep_hidden."""
    n, S, H = hidden_nSH.shape
    assert hidden_NH.is_contiguous() and hidden_nSH.is_contiguous() and hidden_NH.dtype == hidden_nSH.dtype
    tile = min(1024, triton.next_power_of_2(H))
    if n:
        _keep_hidden[(n, triton.cdiv(H, tile))](
            hidden_NH, hidden_nSH, column_n, slots_n, S, H, TILE=tile, num_warps=4
        )
