"""Comparisons, as those of decode_cases, of the kernels that draw, decide and settle."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from bailing_mtp.kernels.reference import decode as twin
from bailing_mtp.kernels.reference import noise
from bailing_mtp.kernels.reference.sampling import Drawn
from bailing_mtp.kernels.reference.settle import Book, SlotNumbers
from tests.kernels.decode_cases import Draw, poisoned


def near(ours: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def noise_keys(draw: Draw, n: int) -> noise.NoiseKeys:
    return noise.NoiseKeys(
        draw.integers(0, 2**40, n), draw.integers(0, 1000, n), draw.integers(0, 50, n), draw.integers(0, 8, n)
    )


def temperatures(draw: Draw, n: int) -> Tensor:
    temperature_n = draw.normal(n, dtype=torch.float32).abs() + 0.5
    temperature_n[0] = 0.0
    return temperature_n


def check_log_sum_exps(kernels: ModuleType, device: str, dtype: torch.dtype, *, n: int, S: int, v: int) -> None:
    draw, r = Draw(device, dtype, n + v), n * S
    logits, temperature = draw.normal(r, v, scale=4.0), temperatures(draw, n)
    logits[0, : v // 2] = -torch.inf
    with poisoned():
        ours = kernels.log_sum_exps(logits, temperature)
    near(ours, twin.log_sum_exps(logits, temperature), 1e-5)
    near(ours[0], logits.float().logsumexp(-1), 1e-5)
    logits[0, -1] = torch.nan
    for lse in kernels.log_sum_exps(logits, temperature):
        assert lse.isnan().tolist() == [True] + [False] * (r - 1)


def check_same_draw(ours: Drawn, theirs: Drawn, what: str) -> None:
    drawable = theirs.value_n > -torch.inf
    assert torch.equal(ours.value_n > -torch.inf, drawable), what
    assert torch.equal(ours.id_n[drawable], theirs.id_n[drawable]), what
    near(ours.value_n[drawable], theirs.value_n[drawable])
    assert torch.equal(ours.token_n, theirs.token_n), what
    near(ours.likeliest_n, theirs.likeliest_n, 1e-5)


def check_draw(kernels: ModuleType, device: str, dtype: torch.dtype, *, n: int, v: int, first_id: int) -> None:
    """Tempered and greedy drafts, ties, and their log-sum-exp; a row with NaN draws an id of this rank."""
    draw = Draw(device, dtype, n + v)
    logits, temperature_n, keys = draw.normal(n, v, scale=3.0), temperatures(draw, n), noise_keys(draw, n)
    logits[0, v // 3 :: 7] = 40.0
    position_n = draw.integers(0, 5000, n)
    for offset in (1, 4):
        arguments = (logits, temperature_n, keys, position_n, offset, first_id)
        with poisoned():
            ours, our_lse = kernels.draw(*arguments)
        theirs, their_lse = twin.draw(*arguments)
        check_same_draw(ours, theirs, f"offset {offset}")
        assert torch.equal(ours.likeliest_id_n, theirs.likeliest_id_n) and ours.token_n[0] == v // 3 + first_id
        near(our_lse, their_lse, 1e-5)
    logits[-1, 1::2], logits[0, 0] = torch.nan, torch.inf
    ours, our_lse = kernels.draw(*arguments)
    assert (ours.token_n >= first_id).all() and (ours.token_n < first_id + v).all()
    assert our_lse.isfinite().tolist() == [False] + [True] * (n - 2) + [False]


def check_draw_fresh(
    kernels: ModuleType, device: str, dtype: torch.dtype, *, n: int, k: int, v: int, first_id: int
) -> None:
    """Every count of accepted drafts; some rows have nothing left of p - q, or a q that is not finite."""
    draw = Draw(device, dtype, n * (k + 1) + v)
    p, q = draw.normal(n, k + 1, v, scale=3.0), draw.normal(k, n, v, scale=3.0).transpose(0, 1)
    temperature_n, keys, position_n = temperatures(draw, n), noise_keys(draw, n), draw.integers(0, 5000, n)
    n_accepted_n = torch.arange(n, device=device) % (k + 1)
    scale = torch.where(temperature_n > 0, temperature_n, 1.0)[:, None, None]
    if k and n > 2 * k + 3:
        # Nothing is left of p - q: the target is the draft's own distribution.
        q[k + 1, 0] = p[k + 1, 0]
    lse_nS, q_lse_nk = ((x.float() / scale).logsumexp(-1) for x in (p, q))
    if k and n > 2 * k + 3:
        q_lse_nk[k + 1, 0] = lse_nS[k + 1, 0]
        q_lse_nk[2 * k + 2, 0] = torch.nan
    arguments = (p, lse_nS, q, q_lse_nk, n_accepted_n, temperature_n, keys, position_n, first_id)
    with poisoned():
        ours = kernels.draw_fresh(*arguments)
    theirs = twin.draw_fresh(*arguments)
    check_same_draw(ours, theirs, f"{k} drafts")
    assert torch.equal(ours.likeliest_id_n, theirs.likeliest_id_n)
    gone = (ours.value_n == -torch.inf).nonzero().flatten().tolist()
    assert gone == ([k + 1] if k and n > 2 * k + 3 and temperature_n[k + 1] > 0 else [])


def check_verdict(
    kernels: ModuleType, device: str, dtype: torch.dtype, *, n: int, k: int, v: int, first_id: int
) -> None:
    """Drafts of this rank and of others, near the target's distribution; then the whole block."""
    draw, S = Draw(device, dtype, n * (k + 1) + v), k + 1
    p, temperature_n = draw.normal(n, S, v), temperatures(draw, n)
    q = (p[:, :k] + draw.normal(n, k, v, scale=0.3)).transpose(0, 1).contiguous().transpose(0, 1)
    keys, position_n = noise_keys(draw, n), draw.integers(0, 5000, n)
    scale = torch.where(temperature_n > 0, temperature_n, 1.0)[:, None, None]
    raw_nS, lse_nS, q_lse_nk = p.float().logsumexp(-1), (p / scale).logsumexp(-1), (q / scale).logsumexp(-1)
    lse_nS[-1, -1] = torch.nan
    fed_nS = draw.integers(first_id, first_id + v, n, S)
    fed_nS[2::5, 1:2] = first_id + v
    drafts_nk = fed_nS[:, 1:]
    if k:
        inputs = (p, lse_nS, q, q_lse_nk, drafts_nk, temperature_n, first_id)
        with poisoned():
            our_2nk = kernels.draft_log_probs(*inputs)
        their_2nk = twin.draft_log_probs(*inputs)
        near(our_2nk, their_2nk)
        assert (our_2nk[:, 2::5, 0] == 0).all()
        for is_best_nk in (None, draw.integers(0, 2, n, k) > 0):
            inputs = (their_2nk, is_best_nk, temperature_n, keys, position_n)
            with poisoned():
                counts_n = kernels.count_accepted(*inputs)
            assert torch.equal(counts_n, twin.count_accepted(*inputs))
        assert n < 30 or len(counts_n.unique()) == k + 1
    n_accepted_n = torch.arange(n, device=device) % S
    fresh_n = draw.integers(first_id - 1, first_id + v, n)
    lses_2nS = torch.stack([raw_nS, lse_nS])
    inputs = (p, lses_2nS, drafts_nk, n_accepted_n, fresh_n, temperature_n, first_id)
    with poisoned():
        our_tokens, our_log_probs, our_finite = kernels.block_log_probs(*inputs)
    tokens, log_probs, finite = twin.block_log_probs(*inputs)
    assert torch.equal(our_tokens, tokens) and torch.equal(our_finite, finite)
    assert our_finite.logical_not().sum() == 1
    near(our_log_probs, log_probs)


def check_settle(kernels: ModuleType, device: str, *, slots: int, n: int, S: int) -> None:
    """Stops, caps, errors and ended rows, for rows that begin too; and what they then read of their slots."""
    draw, N = Draw(device, torch.float32, slots + S), slots + 1
    slots_n = torch.cat([draw.permutation(slots)[: n - 2], torch.full((2,), slots, device=device)])
    book = Book(
        pending_N=draw.integers(0, 99, N),
        generated_N=draw.integers(0, 20, N).to(torch.int32),
        max_new_N=draw.integers(19, 24, N).to(torch.int32),
        error_N=draw.integers(0, 9, N) == 0,
        finished_N=draw.integers(0, 6, N) == 0,
        stop_ids_NX=draw.integers(-1, 12, N, 3).to(torch.int32),
    )
    tokens_nS, n_accepted_n = draw.integers(0, 25, n, S), draw.integers(0, S, n)
    log_probs_3nS, finite_nS = draw.normal(3, n, S), draw.integers(0, 9, n, S) > 0
    log_probs_3nS[2, 0] = torch.nan
    for known_n in (None, draw.integers(-1, 2, n)):
        found = []
        for settle in (kernels.settle, twin.settle):
            copy = Book(*(field.clone() for field in book))
            packed_nW = torch.full((n, 4 * S + 4 + S % 2), -9, dtype=torch.int32, device=device)
            with poisoned():
                committed_n = settle(
                    tokens_nS, n_accepted_n, log_probs_3nS, finite_nS, known_n, copy, slots_n, packed_nW
                )
            # The scratch slot holds what one of its rows left.
            found.append([committed_n[:-2], packed_nW[:-2], *(field[:-1] for field in copy)])
        for number, (ours, theirs) in enumerate(zip(*found, strict=True)):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), f"output {number}"
        if n > 100 and known_n is None:
            assert {0, 1, 2} == set(packed_nW[:, S + 2].tolist()) and {0, 1} == set(packed_nW[:, S + 3].tolist())


def check_slots(kernels: ModuleType, device: str, dtype: torch.dtype, *, slots: int, n: int, S: int, H: int) -> None:
    """What rows read of their slots, and what a commit leaves there."""
    draw, N = Draw(device, torch.float32, slots + H), slots + 1
    slots_n = torch.cat([draw.permutation(slots)[: n - 3], torch.full((3,), slots, device=device)])

    def integers() -> Tensor:
        return draw.integers(0, 5000, N).to(torch.int32)

    numbers = SlotNumbers(
        draw.normal(N), integers(), draw.normal(N), integers(), integers(),
        draw.integers(-1, 99, N, 5).to(torch.int32), draw.integers(-1, 99, N, 9).to(torch.int32),
        draw.integers(0, 2**40, N), integers(), integers(), integers(), integers(), draw.integers(0, 2**18, N),
        draw.integers(0, 2, N) > 0,
    )  # fmt: skip
    with poisoned():
        ours = kernels.read_slots(numbers, slots_n)
    theirs = twin.read_slots(numbers, slots_n)
    for name, our, their in zip(numbers._fields, ours, theirs, strict=True):
        assert our.dtype == their.dtype and torch.equal(our, their), name

    hidden_nSH, column_n = draw.normal(n, S, H, dtype=dtype), draw.integers(0, S, n)
    hidden_NH, committed_n = draw.normal(N, H, dtype=dtype), draw.integers(0, S + 1, n)
    count, parity, position = integers(), draw.integers(0, 2, N).to(torch.int32), integers()
    for x in (count, parity, position):
        x[slots] = 0
    found = []
    for chosen in (kernels, twin):
        left = [x.clone() for x in (count, parity, position, hidden_NH)]
        chosen.commit(*left[:3], slots_n, committed_n, slots)
        chosen.keep_hidden(left[3], hidden_nSH, column_n, slots_n)
        assert [int(x[slots]) for x in left[:3]] == [0, 0, 0]
        found.append([*left[:3], left[3][:-1]])
    assert all(torch.equal(our, their) for our, their in zip(*found, strict=True))
