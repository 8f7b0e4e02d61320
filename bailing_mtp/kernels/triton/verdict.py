"""The decisions of a step from a few numbers per row, one program each.

Shape legend: as kernels.reference.verdict.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bailing_mtp.kernels.reference.noise import ACCEPT, NoiseKeys


@triton.jit
def _draft_log_probs(
    out, p_logits, lse_nS, q_logits, q_lse_nk, tokens, temperature_n,
    q_row_stride, q_draft_stride, token_stride, v, first_id, k: tl.constexpr, K_PAD: tl.constexpr,
):  # fmt: skip
    row, n = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    ids_k = tl.arange(0, K_PAD)
    in_k = ids_k < k
    temperature = tl.load(temperature_n + row)
    scale = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    column_k = tl.load(tokens + row * token_stride + ids_k, mask=in_k, other=0) - first_id
    here_k = in_k & (column_k >= 0) & (column_k < v)
    p_row_k = row * (k + 1) + ids_k
    p_k = tl.load(p_logits + p_row_k * v + column_k, mask=here_k, other=0.0).to(tl.float32) * scale
    q_at = q_logits + row * q_row_stride + ids_k.to(tl.int64) * q_draft_stride
    q_k = tl.load(q_at + column_k, mask=here_k, other=0.0).to(tl.float32) * scale
    p_k -= tl.load(lse_nS + p_row_k, mask=in_k, other=0.0)
    q_k -= tl.load(q_lse_nk + row * k + ids_k, mask=in_k, other=0.0)
    tl.store(out + row * k + ids_k, tl.where(here_k, p_k, 0.0), mask=in_k)
    tl.store(out + (n + row) * k + ids_k, tl.where(here_k, q_k, 0.0), mask=in_k)


def draft_log_probs(
    logits_nSv: Tensor,
    lse_nS: Tensor,
    draft_logits_nkv: Tensor,
    draft_lse_nk: Tensor,
    tokens_nk: Tensor,
    temperature_n: Tensor,
    first_id: int,
) -> Tensor:
    """As kernels.reference.verdict.draft_log_probs."""
    (n, k), v = tokens_nk.shape, logits_nSv.shape[-1]
    assert logits_nSv.is_contiguous() and lse_nS.is_contiguous() and draft_lse_nk.is_contiguous()
    assert draft_logits_nkv.stride(2) == 1 and (k == 1 or tokens_nk.stride(1) == 1) and temperature_n.is_contiguous()
    out = torch.empty(2, n, k, dtype=torch.float32, device=logits_nSv.device)
    if out.numel():
        _draft_log_probs[(n,)](
            out, logits_nSv, lse_nS, draft_logits_nkv, draft_lse_nk, tokens_nk, temperature_n,
            draft_logits_nkv.stride(0), draft_logits_nkv.stride(1), tokens_nk.stride(0), v, first_id,
            k=k, K_PAD=triton.next_power_of_2(k), num_warps=1,
        )  # fmt: skip
    return out


@triton.jit
def _count_accepted(
    n_accepted_n, log_probs_2nk, is_best_nk, temperature_n, seed_n, step_n, prompt_n, sample_n, position_n,
    k: tl.constexpr, GREEDY: tl.constexpr, PURPOSE: tl.constexpr, K_PAD: tl.constexpr,
):  # fmt: skip
    row, n = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    ids_k = tl.arange(0, K_PAD)
    in_k = ids_k < k
    p_k = tl.exp(tl.load(log_probs_2nk + row * k + ids_k, mask=in_k, other=0.0))
    q_k = tl.exp(tl.load(log_probs_2nk + (n + row) * k + ids_k, mask=in_k, other=0.0))
    if GREEDY:
        is_greedy = tl.load(temperature_n + row) <= 0
        is_best_k = tl.load(is_best_nk + row * k + ids_k, mask=in_k, other=0) != 0
        p_k = tl.where(is_greedy, tl.where(is_best_k, 1.0, 0.0), p_k)
        q_k = tl.where(is_greedy, 1.0, q_k)
    key = (tl.load(seed_n + row) & 0xFFFFFFFF) | (tl.load(step_n + row) << 32)
    zero_k = tl.zeros([K_PAD], tl.uint32)
    c1_k = ((tl.load(position_n + row) + 1 + ids_k) * 4 + PURPOSE).to(tl.uint32)
    c2_k = zero_k + tl.load(prompt_n + row).to(tl.uint32)
    c3_k = zero_k + tl.load(sample_n + row).to(tl.uint32)
    word_k, _, _, _ = tl.philox(key, zero_k, c1_k, c2_k, c3_k)
    u_k = tl.minimum((word_k.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 2.0**-24)
    accepts_k = in_k & (u_k * q_k < p_k) & (q_k > 0)
    tl.store(n_accepted_n + row, tl.min(tl.where(accepts_k, k, ids_k), axis=0).to(tl.int64))


def count_accepted(
    log_probs_2nk: Tensor, is_best_nk: Tensor | None, temperature_n: Tensor, keys: NoiseKeys, position_n: Tensor
) -> Tensor:
    """As kernels.reference.verdict.count_accepted."""
    _, n, k = log_probs_2nk.shape
    assert k > 0 and log_probs_2nk.is_contiguous() and (is_best_nk is None or is_best_nk.is_contiguous())
    assert all(x.is_contiguous() for x in (*keys, temperature_n, position_n))
    n_accepted_n = torch.empty(n, dtype=torch.int64, device=position_n.device)
    if n:
        _count_accepted[(n,)](
            n_accepted_n, log_probs_2nk, temperature_n if is_best_nk is None else is_best_nk, temperature_n, *keys,
            position_n, k=k, GREEDY=is_best_nk is not None, PURPOSE=ACCEPT, K_PAD=triton.next_power_of_2(k + 1),
            num_warps=1,
        )  # fmt: skip
    return n_accepted_n


@triton.jit
def _block_log_probs(
    tokens_nS, log_probs_3nS, finite_nS, logits, lses_2nS, drafts, n_accepted_n, fresh_n, temperature_n,
    draft_stride, v, first_id, S: tl.constexpr, S_PAD: tl.constexpr,
):  # fmt: skip
    row, n = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    ids_S = tl.arange(0, S_PAD)
    in_S, places, size = ids_S < S, row * S + ids_S, n.to(tl.int64) * S
    is_draft_S = ids_S < tl.load(n_accepted_n + row)
    draft_S = tl.load(drafts + row * draft_stride + ids_S, mask=is_draft_S, other=0)
    token_S = tl.where(is_draft_S, draft_S, tl.load(fresh_n + row))
    tl.store(tokens_nS + places, token_S, mask=in_S)
    temperature = tl.load(temperature_n + row)
    scale = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    column_S = token_S - first_id
    here_S = in_S & (column_S >= 0) & (column_S < v)
    logit_S = tl.load(logits + places * v + column_S, mask=here_S, other=0.0).to(tl.float32)
    raw_S = logit_S - tl.load(lses_2nS + places, mask=in_S, other=0.0)
    lse_S = tl.load(lses_2nS + size + places, mask=in_S, other=0.0)
    tempered_S = tl.where(temperature > 0, logit_S * scale - lse_S, 0.0)
    kept_S = tl.zeros([S_PAD], tl.float32) + tl.where(temperature > 0, 0.0, float("nan"))
    tl.store(log_probs_3nS + places, tl.where(here_S, raw_S, 0.0), mask=in_S)
    tl.store(log_probs_3nS + size + places, tl.where(here_S, tempered_S, 0.0), mask=in_S)
    tl.store(log_probs_3nS + 2 * size + places, kept_S, mask=in_S)
    # Comparisons with NaN are false.
    tl.store(finite_nS + places, tl.abs(lse_S) < float("inf"), mask=in_S)


def block_log_probs(
    logits_nSv: Tensor,
    lses_2nS: Tensor,
    drafts_nk: Tensor,
    n_accepted_n: Tensor,
    fresh_n: Tensor,
    temperature_n: Tensor,
    first_id: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """As kernels.reference.verdict.block_log_probs."""
    n, S, v = logits_nSv.shape
    assert logits_nSv.is_contiguous() and lses_2nS.is_contiguous() and temperature_n.is_contiguous()
    assert S <= 2 or drafts_nk.stride(1) == 1
    tokens_nS = torch.empty(n, S, dtype=torch.int64, device=logits_nSv.device)
    log_probs_3nS = torch.empty(3, n, S, dtype=torch.float32, device=logits_nSv.device)
    finite_nS = torch.empty(n, S, dtype=torch.bool, device=logits_nSv.device)
    if n:
        _block_log_probs[(n,)](
            tokens_nS, log_probs_3nS, finite_nS, logits_nSv, lses_2nS, drafts_nk, n_accepted_n, fresh_n,
            temperature_n, drafts_nk.stride(0), v, first_id, S=S, S_PAD=triton.next_power_of_2(S), num_warps=1,
        )  # fmt: skip
    return tokens_nS, log_probs_3nS, finite_nS
