"""Benchmark cases of drawing tokens from fp32 logits.

Shape legend: n rows of a step, S tokens fed to each, R = n * S rows of logits, V vocabulary.
"""

import torch
from torch import Tensor

from bailing_mtp.kernels.reference import noise
from bailing_mtp.kernels.triton import sampling

from .bench_case import TOLERANCE, Call, Case, Draw, Workload, differing_rows, worst_error

TEMPERATURE = 0.8
CHECKED_ROWS = 16
"""Rows of noise that the check holds at a time, in plain torch."""


def sampling_cases(load: Workload, n: int, S: int) -> list[Case]:
    """Log-sum-exps of all rows; one draw for each sequence, after drafts from what they leave of the target."""
    name = "draw residual" if S > 1 else "draw"
    return [
        Case("log_sum_exps", n, S, lambda draw: _log_sum_exps(load, draw, n * S)),
        Case(name, n, S, lambda draw: _draw(load, draw, n, S)),
    ]


def _log_sum_exps(load: Workload, draw: Draw, R: int) -> Call:
    logits_RV = draw.normal(R, load.arch.vocab_size, scale=3.0, dtype=torch.float32)
    temperature_R = torch.full((R,), TEMPERATURE, device=draw.device)

    def run() -> tuple[Tensor, Tensor]:
        return sampling.log_sum_exps(logits_RV, temperature_R)

    def error() -> float:
        return worst_error(run(), (logits_RV.logsumexp(-1), (logits_RV / TEMPERATURE).logsumexp(-1)))

    return Call(run, error, load.floors.log_sum_exps(R), TOLERANCE[torch.float32])


def _draw(load: Workload, draw: Draw, n: int, S: int) -> Call:
    V, fp32, device = load.arch.vocab_size, torch.float32, draw.device
    p_RV = draw.normal(n * S, V, scale=3.0, dtype=fp32)
    row_n, position_n = draw.permutation(n * S)[:n].contiguous(), draw.integers(load.context_tokens, n)
    temperature_n = torch.full((n,), TEMPERATURE, device=device)
    keys = noise.NoiseKeys(*(draw.integers(1000, n) for _ in noise.NoiseKeys._fields))
    counter_n = position_n * 4 + noise.FRESH
    residual = None
    if S > 1:
        q_nV, q_row_n = draw.normal(n, V, scale=3.0, dtype=fp32), draw.permutation(n)
        p_lse_n = torch.stack([(p_RV[row] / TEMPERATURE).logsumexp(-1) for row in row_n.tolist()])
        q_lse_n = torch.stack([(q_nV[row] / TEMPERATURE).logsumexp(-1) for row in q_row_n.tolist()])
        residual = sampling.Residual(q_nV, q_row_n, p_lse_n, q_lse_n, torch.ones(n, dtype=torch.bool, device=device))

    def run() -> sampling.Drawn:
        return sampling.draw(p_RV, row_n, temperature_n, tuple(keys), counter_n, 0, residual)

    def error() -> float:
        ours = run()
        parts = [
            _best(p_RV, row_n, residual, keys, position_n, slice(first, first + CHECKED_ROWS))
            for first in range(0, n, CHECKED_ROWS)
        ]
        id_n, value_n = (torch.cat(part) for part in zip(*parts, strict=True))
        flipped = differing_rows(ours.id_n, id_n).double().mean().item()
        return max(flipped, worst_error([ours.value_n], [value_n]))

    # A draw that ends elsewhere than the twin's is an error of 1 / n, above any tolerance here.
    return Call(run, error, load.floors.draw(n, residual is not None), TOLERANCE[fp32])


def _best(
    p_RV: Tensor,
    row_n: Tensor,
    residual: sampling.Residual | None,
    keys: noise.NoiseKeys,
    position_n: Tensor,
    rows: slice,
) -> tuple[Tensor, Tensor]:
    """Id and score that each of `rows` draws, in plain torch."""
    score_xV = p_RV[row_n[rows]] / TEMPERATURE
    if residual is not None:
        q_xV = residual.q_logits_xv[residual.q_row_n[rows]] / TEMPERATURE
        p_xV = (score_xV - residual.p_lse_n[rows, None]).exp()
        score_xV = (p_xV - (q_xV - residual.q_lse_n[rows, None]).exp()).clamp(min=0).log()
    mine = noise.NoiseKeys(*(word[rows] for word in keys))
    score_xV = score_xV + noise.gumbel(mine, position_n[rows], noise.FRESH, 0, p_RV.shape[1])
    best = score_xV.max(-1)
    return best.indices, best.values
