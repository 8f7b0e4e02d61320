"""Drawing from large vocabularies in one pass over the logits: log-sum-exp, and Gumbel argmax with its own noise.

The noise is that of kernels.reference.noise: Philox4x32-10 with key (seed, step) and counter (vocabulary id >> 2,
position * 4 + purpose, prompt index, sample index); token id takes word id & 3. A vocabulary split over ranks
draws each rank's best, which the caller compares.

Shape legend: r rows of logits, n rows to draw, v this rank's vocabulary rows, P parts of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bailing_mtp.kernels.reference.sampling import Drawn, Residual

PART = 4096
"""Vocabulary ids of a program."""


@triton.jit
def _lse_parts(part_max, part_raw, part_tempered, logits, temperature_r, v, P, PART: tl.constexpr):
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    ids = part * PART + tl.arange(0, PART)
    x = tl.load(logits + row * v + ids, mask=ids < v, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperature_r + row)
    scale = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    best = tl.max(x, axis=0)
    base = tl.where(best == float("-inf"), 0.0, best)
    place = row * P + part
    tl.store(part_max + place, best)
    tl.store(part_raw + place, tl.sum(tl.exp(x - base), axis=0))
    tl.store(part_tempered + place, tl.sum(tl.exp((x - base) * scale), axis=0))


@triton.jit
def _lse_join(raw_r, tempered_r, part_max, part_raw, part_tempered, temperature_r, P, P_PAD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, P_PAD)
    places, in_P = row * P + ids, ids < P
    best_P = tl.load(part_max + places, mask=in_P, other=float("-inf"))
    temperature = tl.load(temperature_r + row)
    scale = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    # max() passes NaN by; the sums bring it in.
    best = tl.max(best_P, axis=0)
    base = tl.where(best == float("-inf"), 0.0, best)
    raw = tl.load(part_raw + places, mask=in_P, other=0.0) * tl.exp(best_P - base)
    tempered = tl.load(part_tempered + places, mask=in_P, other=0.0) * tl.exp((best_P - base) * scale)
    tl.store(raw_r + row, base + tl.log(tl.sum(raw, axis=0)))
    tl.store(tempered_r + row, base * scale + tl.log(tl.sum(tempered, axis=0)))


def log_sum_exps(logits_rv: Tensor, temperature_r: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of the logits, and of logits / temperature (as they are where that is 0); fp32 [r] each."""
    (r, v), device = logits_rv.shape, logits_rv.device
    assert logits_rv.is_contiguous() and temperature_r.dtype == torch.float32
    parts = triton.cdiv(v, PART)
    best_rP, raw_rP, tempered_rP = (
        torch.empty(r, parts, dtype=torch.float32, device=device) for _ in range(3)
    )
    raw_r, tempered_r = (torch.empty(r, dtype=torch.float32, device=device) for _ in range(2))
    if r:
        _lse_parts[(parts, r)](
            best_rP, raw_rP, tempered_rP, logits_rv, temperature_r, v, parts, PART=PART, num_warps=8
        )
        _lse_join[(r,)](
            raw_r, tempered_r, best_rP, raw_rP, tempered_rP, temperature_r, parts,
            P_PAD=triton.next_power_of_2(parts), num_warps=1,
        )  # fmt: skip
    return raw_r, tempered_r


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
    part_score, part_id, part_logit, part_logit_id,
    p_logits, q_logits, p_row_n, q_row_n, p_lse_n, q_lse_n, residual_n, temperature_n,
    seed_n, step_n, prompt_n, sample_n, counter_n,
    v, P, first_id, PART: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    # Parts begin at multiples of 4, since 4 ids share a block of noise.
    block = (first_id // 4 + part * (PART // 4) + tl.arange(0, PART // 4)).to(tl.uint32)
    ids = (first_id // 4) * 4 + part * PART + tl.arange(0, PART)
    columns = ids - first_id
    in_v = (columns >= 0) & (columns < v)
    temperature = tl.load(temperature_n + row)
    scale = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    p_row = tl.load(p_row_n + row).to(tl.int64)
    logit = tl.load(p_logits + p_row * v + columns, mask=in_v, other=float("-inf")).to(tl.float32) * scale
    score = logit
    if RESIDUAL:
        if tl.load(residual_n + row):
            q_row = tl.load(q_row_n + row).to(tl.int64)
            q = tl.load(q_logits + q_row * v + columns, mask=in_v, other=float("-inf")).to(tl.float32) * scale
            left = tl.exp(logit - tl.load(p_lse_n + row)) - tl.exp(q - tl.load(q_lse_n + row))
            score = tl.where(left > 0, tl.log(tl.where(left > 0, left, 1.0)), float("-inf"))
    key = (tl.load(seed_n + row) & 0xFFFFFFFF) | (tl.load(step_n + row) << 32)
    counter = tl.zeros([PART // 4], tl.uint32)
    c1 = counter + tl.load(counter_n + row).to(tl.uint32)
    c2 = counter + tl.load(prompt_n + row).to(tl.uint32)
    c3 = counter + tl.load(sample_n + row).to(tl.uint32)
    # A greedy row draws its largest logit.
    score += tl.where(temperature > 0, gumbel(block, c1, c2, c3, key), 0.0)
    place = row * P + part
    best, at = tl.max(tl.where(in_v, score, float("-inf")), axis=0, return_indices=True)
    tl.store(part_score + place, best)
    tl.store(part_id + place, ((first_id // 4) * 4 + part * PART + at).to(tl.int64))
    best, at = tl.max(logit, axis=0, return_indices=True)
    tl.store(part_logit + place, best)
    tl.store(part_logit_id + place, ((first_id // 4) * 4 + part * PART + at).to(tl.int64))


@triton.jit
def _draw_join(value_n, id_n, part_value, part_id, P, P_PAD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, P_PAD)
    value_P = tl.load(part_value + row * P + ids, mask=ids < P, other=float("-inf"))
    best, at = tl.max(value_P, axis=0, return_indices=True)
    tl.store(value_n + row, best)
    tl.store(id_n + row, tl.load(part_id + row * P + at))


def draw(
    logits_rv: Tensor,
    row_n: Tensor,
    temperature_n: Tensor,
    keys: tuple[Tensor, Tensor, Tensor, Tensor],
    counter_n: Tensor,
    first_id: int,
    residual: Residual | None = None,
) -> Drawn:
    """Gumbel argmax of logits / temperature, or of log(max(p - q, 0)), in row `row_n` of the logits.

    keys: seed, step, prompt index, sample index, int64 [n]. counter_n: position * 4 + purpose. Ties go to the
    lower id. first_id: global id of this rank's first vocabulary row.
    """
    (_, v), n, device = logits_rv.shape, row_n.shape[0], logits_rv.device
    assert logits_rv.is_contiguous() and (residual is None or residual.q_logits_xv.is_contiguous())
    parts = triton.cdiv(first_id % 4 + v, PART)
    scores_nP, logit_nP = (torch.empty(n, parts, dtype=torch.float32, device=device) for _ in range(2))
    ids_nP, logit_ids_nP = (torch.empty(n, parts, dtype=torch.int64, device=device) for _ in range(2))
    value_n, likeliest_n = (torch.empty(n, dtype=torch.float32, device=device) for _ in range(2))
    id_n, likeliest_id_n = (torch.empty(n, dtype=torch.int64, device=device) for _ in range(2))
    q = residual or Residual(logits_rv, row_n, temperature_n, temperature_n, row_n)
    if n:
        _draw_parts[(parts, n)](
            scores_nP, ids_nP, logit_nP, logit_ids_nP, logits_rv, q.q_logits_xv, row_n, q.q_row_n, q.p_lse_n,
            q.q_lse_n, q.residual_n, temperature_n, *keys, counter_n, v, parts, first_id,
            PART=PART, RESIDUAL=residual is not None, num_warps=8,
            # Equal p and q must leave exactly nothing.
            enable_fp_fusion=False,
        )  # fmt: skip
        for values_nP, places_nP, value, place in (
            (scores_nP, ids_nP, value_n, id_n),
            (logit_nP, logit_ids_nP, likeliest_n, likeliest_id_n),
        ):
            _draw_join[(n,)](
                value, place, values_nP, places_nP, parts, P_PAD=triton.next_power_of_2(parts), num_warps=1
            )
    return Drawn(id_n, value_n, likeliest_id_n, likeliest_n)
