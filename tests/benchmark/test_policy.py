"""what=grpo on the CPU: whole updates of the grpo recipe on random weights, both arms, every phase."""

import json
from pathlib import Path

import pytest
import torch

from bailing_mtp.config import ConfigError, check_backends
from bailing_mtp.parallel.context import destroy_context
from bailing_mtp.training.memory_plan import RESERVE
from recipes import bench_policy, bench_policy_run
from tests.benchmark.sizes import SMALLEST, config_of, smallest
from tests.distributed.worlds import layout

SMALL = (
    "what=grpo", "model=tiny", *(f"model.architecture.{key}={value}" for key, value in SMALLEST.items()),
    "prompts=3", "samples=4", "prompt_tokens=[5]", "new_tokens=6", "steps=1", "drafts=[0,2]", "microbatch_tokens=64",
    "rollout.keep_memory=true", "optim=adamw8bit", "optim.lr=1e-2", "mtp.loss_scale=0.1", "mtp.detach=true",
)  # fmt: skip


@pytest.mark.parametrize("replay", [False, True])
def test_both_arms_go_through_every_phase(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch, replay: bool):
    monkeypatch.setattr(bench_policy_run, "leave_ranks", destroy_context)
    target = tmp_path / "benchmark.json"
    config = config_of(*SMALL, f"routing_replay={str(replay).lower()}")
    bench_policy_run.run_policy(config, lambda device: {"device": "none"}, target)
    figures = json.loads(target.read_text())["figures"]
    assert [(x["drafts"], x["update"]) for x in figures] == [(0, 1), (2, 1)]
    for x in figures:
        # 11 tokens a sample; a prompt whose samples all got the same coin is left out.
        assert x["trained_tokens"] == 11 * x["samples"] and x["samples"] % 4 == 0 < x["samples"]
        assert x["microbatches"] == -(-x["trained_tokens"] // 64)
        assert x["logprob_gap"] < 1e-4 and x["grad_norm"] > 0 and 0 < x["weights_changed"] <= 1
        assert all(x[f"{name}_s"] > 0 for name in ("rollout", "reward", "train"))
        assert x["train_tokens_per_s"] == pytest.approx(x["trained_tokens"] / x["train_s"])
    assert figures[0]["accept_length"] == 1 <= figures[1]["accept_length"] <= 3
    out = capsys.readouterr().out
    for part in ("k=0: rollout", "k=0: training", "k=2: rollout", "k=2: training", "2 updates"):
        assert part in out
    assert out.index("k=0: rollout") < out.index("k=0: training") < out.index("k=2: rollout")


def test_prompts_are_random_ids_of_one_length_and_the_same_again():
    config, arch = config_of(*SMALL), smallest()
    first, again = (
        bench_policy.random_prompts(bench_policy.policy_config(config, 2), arch, 5).draw(3) for _ in range(2)
    )
    assert [p.prompt_ids for p in first] == [p.prompt_ids for p in again]
    assert len({p.prompt_ids for p in first}) == 3 and {len(p.prompt_ids) for p in first} == {5}
    assert all(0 <= x < arch.vocab_size for p in first for x in p.prompt_ids)
    assert {(p.samples_per_prompt, p.sampling.max_new_tokens, p.sampling.ignore_eos) for p in first} == {(4, 6, True)}


def test_the_shipped_experiment_is_the_recipes():
    """experiment=grpo_benchmark measures what experiment=ling3_tiny_grpo runs."""
    from bailing_mtp.config import GrpoConfig, build_config
    from recipes.compose import compose

    bench = config_of("experiment=grpo_benchmark")
    plain = compose(
        GrpoConfig, "grpo", ["experiment=ling3_tiny_grpo", "checkpoint.load=x", "data.path=x"], run_dir="out"
    )
    shipped = build_config(GrpoConfig, plain)
    ours = bench_policy.policy_config(bench, 2)
    assert (ours.optim, ours.mtp) == (shipped.optim, shipped.mtp)
    assert ours.rollout.model_copy(update={"context_tokens": None}) == shipped.rollout
    for name in ("microbatch_tokens", "recompute"):
        assert getattr(ours.train, name) == getattr(shipped.train, name)
    assert ours.rl.prompts_per_rollout == shipped.rl.prompts_per_rollout == 64
    assert ours.sampling.samples_per_prompt == shipped.sampling.samples_per_prompt == 8
    model = ("dtype", "kda", "experts", "kernels", "attention")
    assert all(getattr(ours.model, name) == getattr(shipped.model, name) for name in model)


def test_the_shipped_experiment_fits_into_its_gpu():
    """By its plan, at the longest prompt and response, on a GPU of 140 GB."""
    from bailing_mtp.config import GrpoConfig, build_config
    from bailing_mtp.contracts.architecture import Architecture
    from bailing_mtp.training.memory_plan import GIB, plan_training
    from recipes.compose import compose
    from recipes.memory import plan_inputs
    from recipes.session import Source

    arguments = ["experiment=ling3_tiny_grpo", "model=ling3_tiny", "data.path=x"]
    config = build_config(GrpoConfig, compose(GrpoConfig, "grpo", arguments, run_dir="out"))
    arch = Architecture.from_hf(config.model.architecture, "model.architecture", strict=True)
    engine = config.rollout.model_copy(update={"context_tokens": config.data.seq_tokens})
    with layout(tp=1, ep=1) as context:
        source = Source(arch=arch, directory=None, holds_mtp=True, router_dtype=torch.bfloat16)
        inputs = plan_inputs(config, source, context, engine)
    assert inputs.rollout is not None and inputs.rollout.stays
    # Not cut by the budget: all rows can reach the longest response.
    assert 0.8 * config.rollout.memory_gb * GIB < inputs.rollout.memory < config.rollout.memory_gb * GIB - 2**20
    plan = plan_training(inputs)
    assert plan.peak[1] < 139 * GIB * (1 - RESERVE), plan.lines(139 * GIB)


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match="what: 'grpo' needs a CUDA device"):
        check_backends(config_of("what=grpo"), has_gpu=False)
    with pytest.raises(ConfigError, match="samples: 1 leaves nothing to compare"):
        config_of("what=grpo", "samples=1")
