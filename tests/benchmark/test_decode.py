"""What a benchmark of whole rollouts is made of, on the CPU: forced drafts, the bytes of a step, weights in shards."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from bailing_mtp.config import RolloutConfig
from bailing_mtp.contracts.samples import Prompt, SamplingParams
from bailing_mtp.kernels.reference import decode
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.rollout.engine import RolloutEngine
from bailing_mtp.weights.view import MoeWeights
from recipes import bench_adaptive
from recipes.bench_case import Draw
from recipes.bench_decode_figures import DECODE_HEADING, DecodeFailure, DecodeFigure, decode_line, write_decode
from recipes.bench_floors import floor_us
from recipes.bench_forced import ForcedDrafter
from recipes.bench_rollout import Timing
from recipes.bench_step_bytes import StepBytes, Touched, touched_experts
from recipes.bench_weights import random_view
from tests.benchmark.sizes import architecture, config_of, smallest

CPU = torch.device("cpu")


def one_process() -> ParallelContext:
    return ParallelContext(
        rank=0, world_size=1, device=CPU, tp=1, tp_rank=0, ep=1, ep_rank=0, dp=1, dp_rank=0,
        groups=ProcessGroupCollection(),
    )  # fmt: skip


def prompts(n: int, temperature: float = 1.0, new_tokens: int = 13) -> list[Prompt]:
    sampling = SamplingParams(temperature=temperature, max_new_tokens=new_tokens, ignore_eos=True)
    return [Prompt(prompt_ids=(3 + index, 5, 8), index=index, sampling=sampling) for index in range(n)]


@pytest.mark.parametrize(("acceptance", "temperature", "length"), [("all", 1.0, 3), ("none", 1.0, 1), ("all", 0.6, 3)])
def test_drafts_are_kept_as_told(acceptance: str, temperature: float, length: int):
    view = random_view(smallest(), Draw(CPU, torch.float32, 0))
    drafter = ForcedDrafter(CPU)
    drafter.force(acceptance)
    engine = RolloutEngine(lambda: view, one_process(), RolloutConfig(speculative_tokens=2), drafter=drafter)
    groups = engine.generate(prompts(5, temperature))
    # The first token comes from the prefill; the other twelve in steps of one length.
    assert engine.stats.accepted == ([engine.stats.reached[0]] * 2 if length == 3 else [0, 0])
    assert engine.stats.row_steps == 5 * 12 // length
    assert all(len(sample.response_ids) == 13 for group in groups for sample in group.samples)


def test_rejected_drafts_leave_the_target_almost_whole():
    """Forced rejection draws from p without the draft, so that the tokens stay as varied as plain ones."""
    view = random_view(smallest(), Draw(CPU, torch.float32, 0))
    drafter = ForcedDrafter(CPU)
    drafter.force("none")
    engine = RolloutEngine(lambda: view, one_process(), RolloutConfig(speculative_tokens=1), drafter=drafter)
    forced = [s.response_ids for g in engine.generate(prompts(8, new_tokens=30)) for s in g.samples]
    assert len({token for ids in forced for token in ids}) > 100


def test_bytes_of_a_step_are_those_of_the_design():
    """The floors published for the whole model: 0.54 / 1.18 ms at 1 row, 2.55 / 4.02 at 16 (uniform routing)."""
    with torch.device("meta"):
        view = random_view(architecture("ling3_tiny"), _MetaDraw(torch.device("meta"), torch.bfloat16, 0))
    n_moe, E, k = 23, 128, 8

    def union(tokens: int) -> int:
        return round(E * (1 - (1 - k / E) ** tokens))

    for n, plain_ms, speculative_ms in ((1, 0.54, 1.18), (16, 2.55, 4.02)):
        plain = StepBytes(view).step(n, 0, 256, Touched((), (union(n),) * n_moe, ()))
        both = StepBytes(view).step(n, 2, 256, Touched((union(n),), (union(3 * n),) * n_moe, (union(3 * n),)))
        assert floor_us(plain, 4.3) / 1e3 == pytest.approx(plain_ms, rel=0.06)
        assert floor_us(both, 4.3) / 1e3 == pytest.approx(speculative_ms, rel=0.06)


class _MetaDraw(Draw):
    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype, self._generator = device, dtype, None

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.empty(*shape, device=self.device)


def test_touched_experts_are_those_of_the_last_step():
    view = random_view(smallest(), Draw(CPU, torch.float32, 0))
    arch = view.arch
    n_moe = sum(isinstance(layer.mlp, MoeWeights) for layer in view.layers)
    for k in (0, 2):
        touched = touched_experts(view, one_process(), prompts(1), k, decode, "torch")
        assert len(touched.trunk) == n_moe and len(touched.refresh) == (k > 0) and len(touched.drafts) == max(0, k - 1)
        least = arch.experts_per_token
        assert all(least <= count <= min(arch.num_experts, least * (k + 1)) for count in touched.trunk)
    plain = touched_experts(view, one_process(), prompts(1), 0, decode, "torch")
    assert plain.trunk == (arch.experts_per_token,) * n_moe and plain.mean == arch.experts_per_token


def test_skewed_routing_touches_fewer_experts():
    counts = {}
    for is_skewed in (False, True):
        view = random_view(smallest(), Draw(CPU, torch.float32, 0), is_skewed=is_skewed)
        counts[is_skewed] = touched_experts(view, one_process(), prompts(12), 0, decode, "torch").mean
    assert counts[True] < counts[False]


def test_shards_have_their_share():
    whole = random_view(smallest(), Draw(CPU, torch.float32, 0))
    part = random_view(smallest(), Draw(CPU, torch.float32, 0), tp=2, ep=2)
    for mine, full in zip(part.layers, whole.layers, strict=True):
        if isinstance(full.mlp, MoeWeights):
            assert mine.mlp.down_eHF.shape[0] * 2 == full.mlp.down_eHF.shape[0]
            assert mine.mlp.router_EH.shape == full.mlp.router_EH.shape
    assert part.head_vH.shape[0] * 2 == whole.head_vH.shape[0]


FIGURE = DecodeFigure(
    rows=16, drafts=2, temperature=1.0, prompt_tokens=128, routing="uniform", acceptance="all", step_ms=6.0,
    slow_step_ms=6.1, host_gap=0.01, accept_length=3.0, tokens_per_second=8000.0, speed_up=2.0, break_even=1.5,
    expected_break_even=1.58, floor_ms=4.0, ratio=1.5, experts_touched=110.0, padded_rows=16, row_mb=22.9,
    memory_gb=0.5, free_gb=100.0,
)  # fmt: skip


def test_a_controller_is_held_against_the_best_fixed_k(monkeypatch: pytest.MonkeyPatch):
    """Fixed steps of 1.0 and 1.6 ms for up to 3 tokens; k=0 under the controller takes 1.05."""

    class Rollouts:
        def __init__(self, view, context, n, k, prompt_tokens, new_tokens, adaptive=False) -> None:
            self.n, self.k, self.adaptive, self.engine = n, k, adaptive, self

        def release(self) -> None:
            pass

        def run(self, temperature: float, acceptance: str, warm_up_tokens: int = 0) -> Timing:
            steps, step_ms, tokens = (0, 0, 100), 1.6, 3
            if acceptance == "none":
                steps, step_ms, tokens = (100, 0, 0), 1.05, 1
            if not self.adaptive:
                step_ms = {0: 1.0, 2: 1.6}[self.k]
            return Timing(
                step_ms=step_ms, slow_step_ms=0, graph_ms=0, accept_length=0, memory_bytes=0, row_bytes=0,
                free_bytes=0, rollout_ms=100 * step_ms / 0.99, step_tokens=100 * self.n * tokens,
                steps_by_drafts=steps,
            )  # fmt: skip

    monkeypatch.setattr(bench_adaptive, "TimedRollouts", Rollouts)
    config = config_of("what=adaptive", "rows=[4]", "drafts=[0,2]")
    none, every = bench_adaptive.measure_adaptive(config, None, one_process(), lambda figure: None)
    assert (none.own_plain_ms, none.plain_ms, none.best_drafts) == (1.05, 1.0, 0)
    assert (every.own_plain_ms, every.best_drafts) == (None, 2)
    assert none.of_best == pytest.approx(0.99) and every.of_best == pytest.approx(0.99)
    assert every.best_tokens_per_second == pytest.approx(4 * 3 / 1.6e-3)
    assert len(bench_adaptive.adaptive_line(every).split("[")[0]) < len(bench_adaptive.ADAPTIVE_HEADING)


def test_lines_and_file(tmp_path: Path):
    failure = DecodeFailure(4, 1, "route", float("inf"), 0.01)
    assert len(decode_line(FIGURE)) == len(DECODE_HEADING)
    assert "no figure: route differs" in decode_line(failure)
    write_decode(tmp_path / "b.json", {"device": "none"}, [FIGURE, failure, replace(FIGURE, rows=1)])
    content = json.loads((tmp_path / "b.json").read_text())
    assert content["decode"][0] == asdict(FIGURE) and len(content["decode"]) == 2
    assert content["failed"] == [{"rows": 4, "drafts": 1, "kernel": "route", "error": None, "allowed": 0.01}]
