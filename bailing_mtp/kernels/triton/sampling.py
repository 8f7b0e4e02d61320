"""Drawing from large vocabularies in one pass over the logits: log-sum-exp, and Gumbel argmax with its own noise.

The noise is that of kernels.reference.noise: Philox4x32-10 with key (seed, step) and counter (vocabulary id >> 2,
position * 4 + purpose, prompt index, sample index); token id takes word id & 3. A vocabulary split over ranks
draws each rank's best, which the caller compares.

Shape legend: n rows, k drafts, S = k + 1 columns of the target, r rows of logits, v this rank's vocabulary rows,
P parts of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bailing_mtp.kernels.reference import noise
from bailing_mtp.kernels.reference.noise import NoiseKeys
from bailing_mtp.kernels.reference.sampling import Drawn

PART = 4096
"""Vocabulary ids of a program."""


@triton.jit
def _lse_parts(part_max, part_raw, part_tempered, logits, temperature_n, S, v, P, PART: tl.constexpr):
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    ids = part * PART + tl.arange(0, PART)
    x = tl.load(logits + row * v + ids, mask=ids < v, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperature_n + row // S)
    scale = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    best = tl.max(x, axis=0)
    base = tl.where(best == float("-inf"), 0.0, best)
    place = row * P + part
    tl.store(part_max + place, best)
    tl.store(part_raw + place, tl.sum(tl.exp(x - base), axis=0))
    tl.store(part_tempered + place, tl.sum(tl.exp((x - base) * scale), axis=0))


@triton.jit
def _lse_join(raw_r, tempered_r, part_max, part_raw, part_tempered, temperature_n, S, P, P_PAD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, P_PAD)
    places, in_P = row * P + ids, ids < P
    best_P = tl.load(part_max + places, mask=in_P, other=float("-inf"))
    temperature = tl.load(temperature_n + row // S)
    scale = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    # max() passes NaN by; the sums bring it in.
    best = tl.max(best_P, axis=0)
    base = tl.where(best == float("-inf"), 0.0, best)
    raw = tl.load(part_raw + places, mask=in_P, other=0.0) * tl.exp(best_P - base)
    tempered = tl.load(part_tempered + places, mask=in_P, other=0.0) * tl.exp((best_P - base) * scale)
    tl.store(raw_r + row, base + tl.log(tl.sum(raw, axis=0)))
    tl.store(tempered_r + row, base * scale + tl.log(tl.sum(tempered, axis=0)))


def log_sum_exps(logits_rv: Tensor, temperature_n: Tensor) -> Tensor:
    """As kernels.reference.sampling.log_sum_exps."""
    (r, v), n, device = logits_rv.shape, temperature_n.shape[0], logits_rv.device
    assert logits_rv.is_contiguous() and temperature_n.dtype == torch.float32 and r % n == 0
    parts = triton.cdiv(v, PART)
    best_rP, raw_rP, tempered_rP = torch.empty(3, r, parts, dtype=torch.float32, device=device)
    lses_2r = torch.empty(2, r, dtype=torch.float32, device=device)
    if r:
        _lse_parts[(parts, r)](
            best_rP, raw_rP, tempered_rP, logits_rv, temperature_n, r // n, v, parts, PART=PART, num_warps=8
        )
        _lse_join[(r,)](
            *lses_2r, best_rP, raw_rP, tempered_rP, temperature_n, r // n, parts,
            P_PAD=triton.next_power_of_2(parts), num_warps=1,
        )  # fmt: skip
    return lses_2r


@triton.jit
def gumbel(block, c1, c2, c3, key):
    """Standard Gumbel noise of the ids 4 * block .. 4 * block + 3, in their order."""
    w0, w1, w2, w3 = tl.philox(key, block, c1, c2, c3)
    word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    uniform = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 2.0**-24)
    # -log1p(-uniform); near 0, where 1 - uniform has lost its bits and the largest noise comes from, by its series.
    series = uniform * (1.0 + uniform * (0.5 + uniform * (1 / 3 + uniform * (0.25 + uniform * 0.2))))
    exponential = tl.where(uniform < 0.03, series, -tl.log(1.0 - uniform))
    return -tl.log(exponential)


@triton.jit
def _draw_parts(
    part_score, part_id, part_logit, part_logit_id, part_sum,
    p_logits, lse_nS, q_logits, q_lse_nk, n_accepted_n, temperature_n, seed_n, step_n, prompt_n, sample_n, position_n,
    q_row_stride, q_draft_stride, added, v, P, first_id,
    k: tl.constexpr, FRESH: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    # Parts begin at multiples of 4, since 4 ids share a block of noise.
    block = (first_id // 4 + part * (PART // 4) + tl.arange(0, PART // 4)).to(tl.uint32)
    ids = (first_id // 4) * 4 + part * PART + tl.arange(0, PART)
    columns = ids - first_id
    in_v = (columns >= 0) & (columns < v)
    temperature = tl.load(temperature_n + row)
    scale = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    n_accepted = tl.load(n_accepted_n + row).to(tl.int64) if FRESH else row * 0
    p_row = row * (k + 1) + n_accepted if FRESH else row
    logit = tl.load(p_logits + p_row * v + columns, mask=in_v, other=float("-inf")).to(tl.float32) * scale
    score = logit
    if FRESH and k > 0:
        draft = tl.minimum(n_accepted, k - 1)
        q_lse = tl.load(q_lse_nk + row * k + draft)
        # Comparisons with NaN are false.
        if (n_accepted < k) & (temperature > 0) & (tl.abs(q_lse) < float("inf")):
            q_at = q_logits + row * q_row_stride + draft * q_draft_stride
            q = tl.load(q_at + columns, mask=in_v, other=float("-inf")).to(tl.float32) * scale
            left = tl.exp(logit - tl.load(lse_nS + p_row)) - tl.exp(q - q_lse)
            score = tl.where(left > 0, tl.log(tl.where(left > 0, left, 1.0)), float("-inf"))
    key = (tl.load(seed_n + row) & 0xFFFFFFFF) | (tl.load(step_n + row) << 32)
    counter = tl.zeros([PART // 4], tl.uint32)
    c1 = counter + ((tl.load(position_n + row) + n_accepted) * 4 + added).to(tl.uint32)
    c2 = counter + tl.load(prompt_n + row).to(tl.uint32)
    c3 = counter + tl.load(sample_n + row).to(tl.uint32)
    # A greedy row draws its largest logit.
    score += tl.where(temperature > 0, gumbel(block, c1, c2, c3, key), 0.0)
    place = row * P + part
    best, at = tl.max(tl.where(in_v, score, float("-inf")), axis=0, return_indices=True)
    tl.store(part_score + place, best)
    tl.store(part_id + place, ((first_id // 4) * 4 + part * PART + at).to(tl.int64))
    likeliest, at_likeliest = tl.max(logit, axis=0, return_indices=True)
    tl.store(part_logit + place, likeliest)
    tl.store(part_logit_id + place, ((first_id // 4) * 4 + part * PART + at_likeliest).to(tl.int64))
    if not FRESH:
        base = tl.where(likeliest == float("-inf"), 0.0, likeliest)
        tl.store(part_sum + place, tl.sum(tl.exp(logit - base), axis=0))


@triton.jit
def _draw_join(
    value_n, id_n, likeliest_n, likeliest_id_n, token_n, lse_n,
    part_score, part_id, part_logit, part_logit_id, part_sum,
    P, v, first_id, FRESH: tl.constexpr, P_PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, P_PAD)
    places, in_P = row * P + ids, ids < P
    value, at = tl.max(tl.load(part_score + places, mask=in_P, other=float("-inf")), axis=0, return_indices=True)
    logit_P = tl.load(part_logit + places, mask=in_P, other=float("-inf"))
    best, at_best = tl.max(logit_P, axis=0, return_indices=True)
    # Among NaN the place of the largest may be any, past the last part too.
    drawn = tl.load(part_id + row * P + tl.minimum(at, P - 1))
    likeliest = tl.load(part_logit_id + row * P + tl.minimum(at_best, P - 1))
    tl.store(value_n + row, value)
    tl.store(id_n + row, drawn)
    tl.store(likeliest_n + row, best)
    tl.store(likeliest_id_n + row, likeliest)
    token = tl.where(tl.abs(value) < float("inf"), drawn, likeliest)
    tl.store(token_n + row, tl.minimum(tl.maximum(token, first_id), first_id + v - 1))
    if not FRESH:
        # max() passes NaN by; the sums bring it in.
        base = tl.where(best == float("-inf"), 0.0, best)
        sum_P = tl.load(part_sum + places, mask=in_P, other=0.0) * tl.exp(logit_P - base)
        tl.store(lse_n + row, base + tl.log(tl.sum(sum_P, axis=0)))


def draw(
    logits_nv: Tensor, temperature_n: Tensor, keys: NoiseKeys, position_n: Tensor, offset: int, first_id: int
) -> tuple[Drawn, Tensor]:
    """As kernels.reference.sampling.draw, in one pass."""
    nothing = (temperature_n, logits_nv, temperature_n, position_n)
    return _draw(logits_nv, *nothing, temperature_n, keys, position_n, offset * 4 + noise.DRAFT, first_id, None)


def draw_fresh(
    logits_nSv: Tensor,
    lse_nS: Tensor,
    draft_logits_nkv: Tensor,
    draft_lse_nk: Tensor,
    n_accepted_n: Tensor,
    temperature_n: Tensor,
    keys: NoiseKeys,
    position_n: Tensor,
    first_id: int,
) -> Drawn:
    """As kernels.reference.sampling.draw_fresh; the drafts' logits may be strided but for the last dimension."""
    k = draft_lse_nk.shape[1]
    assert draft_logits_nkv.stride(2) == 1 and draft_lse_nk.is_contiguous() and lse_nS.is_contiguous()
    block = (lse_nS, draft_logits_nkv, draft_lse_nk, n_accepted_n)
    return _draw(logits_nSv, *block, temperature_n, keys, position_n, 4 + noise.FRESH, first_id, k)[0]


def _draw(
    logits: Tensor,
    lse_nS: Tensor,
    q_logits: Tensor,
    q_lse_nk: Tensor,
    n_accepted_n: Tensor,
    temperature_n: Tensor,
    keys: NoiseKeys,
    position_n: Tensor,
    added: int,
    first_id: int,
    k: int | None,
) -> tuple[Drawn, Tensor]:
    """k: drafts of a fresh token; None for a draft. added: to the second word of the counter, position * 4."""
    n, v, device = temperature_n.shape[0], logits.shape[-1], logits.device
    assert logits.is_contiguous() and all(x.is_contiguous() for x in (*keys, temperature_n, position_n))
    parts = triton.cdiv(first_id % 4 + v, PART)
    scores_nP, logit_nP, sums_nP = torch.empty(3, n, parts, dtype=torch.float32, device=device)
    ids_nP, logit_ids_nP = torch.empty(2, n, parts, dtype=torch.int64, device=device)
    value_n, likeliest_n, lse_n = torch.empty(3, n, dtype=torch.float32, device=device)
    id_n, likeliest_id_n, token_n = torch.empty(3, n, dtype=torch.int64, device=device)
    found = (scores_nP, ids_nP, logit_nP, logit_ids_nP, sums_nP)
    if n:
        _draw_parts[(parts, n)](
            *found, logits, lse_nS, q_logits, q_lse_nk, n_accepted_n, temperature_n, *keys, position_n,
            q_logits.stride(0), q_logits.stride(1), added, v, parts, first_id,
            k=k or 0, FRESH=k is not None, PART=PART, num_warps=8,
            # Equal p and q must leave exactly nothing.
            enable_fp_fusion=False,
        )  # fmt: skip
        _draw_join[(n,)](
            value_n, id_n, likeliest_n, likeliest_id_n, token_n, lse_n, *found, parts, v, first_id,
            FRESH=k is not None, P_PAD=triton.next_power_of_2(parts), num_warps=1,
        )  # fmt: skip
    return Drawn(id_n, value_n, likeliest_id_n, likeliest_n, token_n), lse_n
