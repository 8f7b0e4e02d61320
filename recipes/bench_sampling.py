"""Benchmark cases of drawing tokens from fp32 logits.

Shape legend: n rows of a step, S tokens fed to each, R = n * S rows of logits, V vocabulary.
"""

import torch
from torch import Tensor

from bailing_mtp.kernels.reference import noise
from bailing_mtp.kernels.reference import sampling as twin
from bailing_mtp.kernels.reference.sampling import Drawn
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

    def run() -> Tensor:
        return sampling.log_sum_exps(logits_RV, temperature_R)

    def error() -> float:
        return worst_error(run().unbind(), (logits_RV.logsumexp(-1), (logits_RV / TEMPERATURE).logsumexp(-1)))

    return Call(run, error, load.floors.log_sum_exps(R), TOLERANCE[torch.float32])


def _draw(load: Workload, draw: Draw, n: int, S: int) -> Call:
    V, k, fp32, device = load.arch.vocab_size, S - 1, torch.float32, draw.device
    p_nSV, position_n = draw.normal(n, S, V, scale=3.0, dtype=fp32), draw.integers(load.context_tokens, n)
    q_nkV = draw.normal(n, k, V, scale=3.0, dtype=fp32)
    temperature_n = torch.full((n,), TEMPERATURE, device=device)
    keys = noise.NoiseKeys(*(draw.integers(1000, n) for _ in noise.NoiseKeys._fields))
    # A draft of every row is rejected, so that all of them draw from p - q.
    n_accepted_n = draw.integers(max(k, 1), n)
    p_lse_nS, q_lse_nk = (
        torch.stack([(row_xV / TEMPERATURE).logsumexp(-1) for row_xV in x_nxV]) for x_nxV in (p_nSV, q_nkV)
    )
    arguments = (p_nSV, p_lse_nS, q_nkV, q_lse_nk, n_accepted_n, temperature_n, keys, position_n)

    def run() -> Drawn:
        return sampling.draw_fresh(*arguments, 0)

    def error() -> float:
        ours = run()
        parts = []
        for first in range(0, n, CHECKED_ROWS):
            rows = slice(first, first + CHECKED_ROWS)
            mine = (noise.NoiseKeys(*(x[rows] for x in part)) if part is keys else part[rows] for part in arguments)
            parts.append(twin.draw_fresh(*mine, 0))
        id_n, value_n = (torch.cat([getattr(part, name) for part in parts]) for name in ("id_n", "value_n"))
        flipped = differing_rows(ours.id_n, id_n).double().mean().item()
        return max(flipped, worst_error([ours.value_n], [value_n]))

    # A draw that ends elsewhere than the twin's is an error of 1 / n, above any tolerance here.
    return Call(run, error, load.floors.draw(n, k > 0), TOLERANCE[fp32])
