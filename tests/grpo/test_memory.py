"""The memory plan in a recipe: what goes into it, the refusal on all ranks, the line and the metrics of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bailing_mtp.config import DpoConfig, GrpoConfig, PretrainConfig, UserError, build_config
from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.rollout.memory import MemoryPlan
from bailing_mtp.training.memory_plan import GIB, plan_training
from bailing_mtp.weights.names import Shard
from recipes.compose import compose
from recipes.memory import MemoryWatch, plan_inputs, watch_memory
from recipes.rollout_memory import LOGITS_IN_GRAPHS
from recipes.session import Source
from tests.distributed.worlds import layout


@pytest.fixture(scope="module")
def context() -> Iterator[ParallelContext]:
    with layout(tp=1, ep=1) as found:
        yield found


@pytest.fixture
def gpu(context: ParallelContext, monkeypatch: pytest.MonkeyPatch) -> ParallelContext:
    """A context that says GPU, with 10 GiB free and a measured peak of 3."""
    answers = {
        "mem_get_info": lambda *_: (9 * GIB, 12 * GIB),
        "memory_reserved": lambda *_: GIB,
        "max_memory_allocated": lambda *_: 3 * GIB,
        "max_memory_reserved": lambda *_: 4 * GIB,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    return dataclasses.replace(context, device=torch.device("cuda", 0))


def grpo(*arguments: str) -> GrpoConfig:
    plain = compose(GrpoConfig, "grpo", ["model=tiny", "data.path=x", *arguments], run_dir="out")
    return build_config(GrpoConfig, plain)


def source_of(config: DpoConfig | GrpoConfig | PretrainConfig) -> Source:
    arch = Architecture.from_hf(config.model.architecture, "model.architecture", strict=True)
    return Source(arch=arch, directory=None, holds_mtp=True, router_dtype=None)


def inputs_of(context: ParallelContext, *arguments: str):
    config = grpo("train.steps=2", *arguments)
    engine = config.rollout.model_copy(update={"context_tokens": 100})
    return plan_inputs(config, source_of(config), context, engine)


def test_the_mtp_layer_is_trained_or_frozen_or_absent(context: ParallelContext):
    absent, frozen, trained = (
        inputs_of(context, *extra).counts
        for extra in ((), ("rollout.speculative_tokens=2",), ("mtp=detached", "rollout.speculative_tokens=2"))
    )
    assert absent.trained == frozen.trained < trained.trained
    assert absent.weight_bytes < frozen.weight_bytes == trained.weight_bytes


def test_a_microbatch_holds_its_longest_rows(context: ParallelContext):
    assert inputs_of(context, "data.seq_tokens=300").least_tokens == 300
    arguments = ["model=tiny", "data.path=x", "train.steps=2", "data.seq_tokens=300"]
    pairs = build_config(DpoConfig, compose(DpoConfig, "dpo", arguments, run_dir="out"))
    assert plan_inputs(pairs, source_of(pairs), context).least_tokens == 600


def test_a_reference_model_is_a_trunk(context: ParallelContext):
    assert inputs_of(context).reference_bytes == 0
    with_kl = inputs_of(context, "rl.kl_coef=0.1", "mtp=detached")
    assert with_kl.reference_bytes == inputs_of(context).counts.weight_bytes < with_kl.counts.weight_bytes


def test_a_rollout_is_planned_as_the_engine_takes_it(context: ParallelContext):
    arguments = ("rl.prompts_per_rollout=4", "rollout.speculative_tokens=2", "sampling.samples_per_prompt=5")
    inputs = inputs_of(context, *arguments)
    arch = inputs.passes.arch
    plan = MemoryPlan.build(arch, Shard(), 2, 20, 4, 100, 64, torch.float32)
    assert inputs.rollout is not None and inputs.rollout.memory == plan.total_bytes
    assert (inputs.rollout.graphs, inputs.rollout.stays) == (0, False)
    graphs = inputs_of(context, *arguments, "rollout.cuda_graphs=true", "rollout.kernels=triton").rollout
    assert graphs is not None and graphs.graphs == LOGITS_IN_GRAPHS * 20 * 3 * arch.vocab_size * 4
    few = inputs_of(context, *arguments, "rollout.max_running=8", "rollout.keep_memory=true").rollout
    assert few is not None and few.memory < plan.total_bytes and few.stays
    with pytest.raises(UserError, match="rollout.memory_gb: 0.001 is too little"):
        inputs_of(context, *arguments, "rollout.memory_gb=0.001")


def test_a_run_prints_its_plan_and_then_what_it_measured(gpu: ParallelContext, capsys: pytest.CaptureFixture):
    config = grpo("train.steps=2")
    engine = config.rollout.model_copy(update={"context_tokens": 100})
    watch = watch_memory(config, source_of(config), gpu, engine)
    planned = plan_training(plan_inputs(config, source_of(config), gpu, engine)).peak[1]
    out = capsys.readouterr().out
    assert out.startswith("memory plan of this rank, GiB: weights") and "of 10.0; in reserve 0.3" in out
    watch.tell(1, is_last=False)
    assert capsys.readouterr().out == ""
    watch.tell(2, is_last=False)
    watch.tell(3, is_last=False)
    assert capsys.readouterr().out == f"memory: planned {planned / GIB:.1f} GiB, measured 3.0 GiB\n"
    assert watch.metrics() == {
        "memory/allocated_gb": 3.0, "memory/reserved_gb": 4.0, "memory/planned_gb": planned / GIB, "memory/peak_gb": 3.0
    }  # fmt: skip


def test_a_run_that_cannot_fit_ends_before_anything_is_built(gpu: ParallelContext):
    arguments = ["model=ling3_tiny", "data.path=x", "train.steps=2"]
    config = build_config(PretrainConfig, compose(PretrainConfig, "pretrain", arguments, run_dir="out"))
    message = r"^train: a rank needs \S+ GiB at its peak .*optim.offload=cpu \(\S+\), optim.name=adamw8bit \("
    with pytest.raises(UserError, match=message):
        watch_memory(config, source_of(config), gpu)


def test_the_cpu_needs_no_plan(context: ParallelContext, capsys: pytest.CaptureFixture):
    config = grpo("train.steps=2")
    watch = watch_memory(config, source_of(config), context, config.rollout)
    watch.tell(2, is_last=True)
    assert watch.metrics() == {} and capsys.readouterr().out == ""
    assert isinstance(watch, MemoryWatch) and not Path("out").exists()
