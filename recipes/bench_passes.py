"""Time of each pass of a decode step, on a model of random weights.

Shape legend: n rows of a step, S tokens fed to each, H hidden size, M blocks of a table.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from bailing_mtp.errors import UserError
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.rollout.memory import MemoryPlan, RolloutMemory
from bailing_mtp.rollout.program import Program
from bailing_mtp.weights.names import Shard
from bailing_mtp.weights.view import WeightsView

from .bench_attention import BLOCK_TOKENS, KEPT_TOKENS
from .bench_case import Draw
from .bench_figures import PassFigure
from .bench_timing import Timer


def measure_passes(
    view: WeightsView,
    kernels: ModuleType,
    draw: Draw,
    timer: Timer,
    rows: Sequence[int],
    fed_tokens: Sequence[int],
    context_tokens: int,
    show: Callable[[PassFigure], None],
) -> list[PassFigure]:
    """Figures of every pass at every shape; `show` gets each as it comes."""
    figures = []
    for n in rows:
        program = _program(view, kernels, draw, n, max(fed_tokens), context_tokens)
        for S in fed_tokens:
            for figure in _one_shape(program, draw, timer, n, S):
                show(figure)
                figures.append(figure)
    return figures


def _program(
    view: WeightsView, kernels: ModuleType, draw: Draw, n: int, most_fed: int, context_tokens: int
) -> Program:
    """All rows in mid-sequence: caches hold anything, `context_tokens` of each sequence are committed."""
    device, reach_tokens = draw.device, 2 * context_tokens + most_fed
    plan = MemoryPlan.build(view.arch, Shard(), most_fed - 1, n, 0, reach_tokens, BLOCK_TOKENS, draw.dtype)
    memory = RolloutMemory(plan, device)
    for tensor in (memory.kda.state_LNhVD, memory.latents_LBbx):
        tensor.normal_(0.0, 0.1)
    memory.slots.position[:n] = context_tokens
    blocks = torch.arange(n * plan.max_blocks, dtype=torch.int32, device=device)
    memory.slots.block_table_NM[:n] = blocks.view(n, -1)
    context = ParallelContext(
        rank=0, world_size=1, device=device, tp=1, tp_rank=0, ep=1, ep_rank=0, dp=1, dp_rank=0,
        groups=ProcessGroupCollection(),
    )  # fmt: skip
    return Program(view, memory, context, kernels)


def _one_shape(program: Program, draw: Draw, timer: Timer, n: int, S: int) -> list[PassFigure]:
    arch, slots_n = program.view.arch, torch.arange(n, device=draw.device)
    program.memory.slots.count[:n] = min(KEPT_TOKENS, S)
    ids_nS, hidden_nSH = draw.integers(arch.vocab_size, n, S), draw.normal(n, S, arch.hidden_size)
    first_nH, first_n = hidden_nSH[:, 0].contiguous(), ids_nS[:, 0].contiguous()
    passes = {"trunk": partial(program.verify, ids_nS, slots_n), "head": partial(program.logits, hidden_nSH)}
    if S > 1 and program.view.mtp is not None:
        passes["head of a draft"] = partial(program.logits, first_nH)
        passes["mtp refresh"] = partial(program.mtp_refresh, ids_nS, hidden_nSH, slots_n)
        passes["mtp step"] = partial(program.mtp_step, first_n, first_nH, 1, slots_n)
    ms = {}
    for name, run in passes.items():
        _require_finite(name, n, S, run())
        ms[name] = timer([run]) * 1e3
    ms["step (no sampling)"] = step_ms(ms, S)
    return [PassFigure(name, n, S, value) for name, value in ms.items()]


def step_ms(ms: dict[str, float], S: int) -> float:
    """All passes of a step; its S - 1 drafts come from the refresh, which gives the first, and from MTP steps."""
    total = ms["trunk"] + ms["head"]
    if "mtp refresh" in ms:
        total += ms["mtp refresh"] + (S - 2) * ms["mtp step"] + (S - 1) * ms["head of a draft"]
    return total


def _require_finite(name: str, n: int, S: int, out: Tensor) -> None:
    if not out.isfinite().all():
        raise UserError(f"what: kernels: the {name} pass of {n} rows with S={S} gives values that are not finite")
