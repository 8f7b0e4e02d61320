"""Training arms of the benchmark on the CPU with a made-up clock: every arm runs, every part is seen."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from bailing_mtp.config import ConfigError
from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.model.settings import ModelSettings
from bailing_mtp.training.flops import training_flops
from bailing_mtp.training.optimizer_state import rank_states
from recipes import bench_train, bench_train_arms, bench_train_parts, bench_train_run, bench_train_size
from tests.benchmark.sizes import config_of, smallest
from tests.distributed.worlds import layout


class Clock:
    """CUDA events whose times are one millisecond apart, in the order of their recording."""

    now = 0

    def __init__(self, **_: object) -> None:
        self.at = 0

    def record(self, *_: object) -> None:
        Clock.now += 1
        self.at = Clock.now

    def synchronize(self, *_: object) -> None:
        pass

    wait = synchronize

    def elapsed_time(self, later: "Clock") -> float:
        return float(later.at - self.at)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch):
    with layout(tp=1, ep=1) as context:
        for name, answer in {
            "Event": Clock,
            "synchronize": lambda *_: None,
            "empty_cache": lambda: None,
            "reset_peak_memory_stats": lambda *_: None,
            "max_memory_allocated": lambda *_: 3 * 2**30,
            "memory_allocated": lambda *_: 2**30,
            "get_device_name": lambda *_: "H200",
        }.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(bench_train_run, "join_ranks", lambda *_: context)
        monkeypatch.setattr(bench_train_run, "leave_ranks", lambda: None)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: dataclasses.make_dataclass(
            "Properties", [("total_memory", int)])(2**40))  # fmt: skip
        monkeypatch.setattr(bench_train_run, "kernel_table", lambda run: [{"kernel": "all", "calls": 1, "ms": 1.0}])
        yield context


def _config(*arguments: str):
    return config_of("what=train", "model=tiny", "tokens=[64,32]", "steps=1", *arguments)


def test_every_arm_is_measured_and_written(on_cpu, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch):
    config = _config("model.experts=grouped")
    arch = smallest()
    monkeypatch.setattr(Architecture, "from_hf", staticmethod(lambda *_, **__: arch))
    bench_train_run.run_train(config, lambda device: {"device": "none"}, tmp_path / "benchmark.json")
    content = json.loads((tmp_path / "benchmark.json").read_text())
    wanted = [(x.name, x.recompute, x.tokens) for x in bench_train_arms.arms((64, 32))]
    assert [(x["mtp"], x["recompute"], x["tokens"]) for x in content["figures"]] == wanted
    assert {"off", "joint", "detached, half", "joint depth 2"} == {name for name, *_ in wanted} - {"off, half"}
    assert {recompute for _, recompute, _ in wanted} == {"none", "selective", "full"}
    figure = content["figures"][0]
    # One millisecond between the start and the end of a run.
    assert (figure["step_ms"], figure["peak_gib"], figure["activation_gib"]) == (1.0, 3.0, 2.0)
    costs = [(x["mtp_cost"], x["mtp_activation_gib"]) for x in content["figures"]]
    assert costs == [(None, None) if x.mtp.loss_scale is None else (0.0, 0.0) for x in bench_train_arms.arms((64, 32))]
    assert figure["tokens_per_second"] == pytest.approx(64 / 1e-3)
    batch = bench_train_arms.pack(arch, 64, 1.0)
    expected = training_flops(arch).of([batch]) / 1e-3
    assert figure["model_tflops_per_s"] == pytest.approx(expected / 1e12)
    assert figure["mfu"] == pytest.approx(expected / 989e12)
    assert set(content["parts_ms"]) == {
        "norms", "kda", "attention", "dense mlp", "experts", "heads", "rest of the passes", "optimizer",
    }  # fmt: skip
    assert f"benchmark: {len(wanted)} arms" in capsys.readouterr().out


def test_arms_are_compared_with_their_own_half():
    everything = list(bench_train_arms.arms((64, 32, 128)))
    with_mtp = [x for x in everything if x.mtp.loss_scale is not None]
    for arm in with_mtp:
        assert everything.index(bench_train_arms.without_mtp(arm)) < everything.index(arm)
    assert {x.tokens for x in with_mtp} == {64, 32, 128} and len(set(everything)) == len(everything)
    plain = bench_train_arms.Figure("off", "none", 64, 10.0, 8.0, 6400.0, 1.0, None, 70.0, 4.0, 1.0)
    joint = dataclasses.replace(plain, tokens_per_second=5600.0, activation_gib=4.75)
    found = bench_train_arms.compared(joint, plain)
    assert (found.mtp_cost, found.mtp_activation_gib) == (pytest.approx(0.125), 0.75)
    assert bench_train_arms.line(found).endswith("12.5%     0.75") and bench_train_arms.line(plain).endswith("1.000")


def test_parts_are_seen_forward_and_backward(on_cpu):
    config, arch = _config(), smallest()
    arm = next(bench_train_arms.arms((64,)))
    state = bench_train.make_state(config, arch, on_cpu, arm)
    objective = bench_train_run.PretrainObjective(arm.mtp)
    spans = bench_train_parts._Spans()
    with bench_train_parts._watched(state, spans):
        bench_train.passes(state, bench_train_arms.pack(arch, 64, 1.0), objective)
    counts: dict[str, int] = {}
    for part, *_ in spans._spans:
        counts[part] = counts.get(part, 0) + 1
    assert counts == {"norms": 8, "kda": 2, "attention": 2, "dense mlp": 2, "experts": 2}


def test_half_of_every_document_is_trained():
    batch = bench_train_arms.pack(smallest(), 64, 0.5)
    assert [int(x.sum()) for x in batch.loss_mask_T.split(batch.layout.lengths)] == [12, 16, 4]


def test_layers_follow_the_memory(on_cpu):
    arch = Architecture.from_hf(_config().model.architecture | {"num_hidden_layers": 12}, "test")

    def layers(config, memory_bytes: int) -> int:
        return bench_train_size.cut_to_memory(config, arch, on_cpu, memory_bytes).num_layers

    assert layers(_config("reserve_gb=1"), 2**40) == 12
    assert layers(_config("reserve_gb=1"), 2**30) == 4
    assert layers(_config("layers=3"), 0) == 3


def test_8_bit_states_leave_room_for_the_whole_model(on_cpu):
    config = config_of("what=train", "optim=adamw8bit")
    arch = Architecture.from_hf(config.model.architecture, "test", strict=True)
    memory_bytes = int(139.8 * 2**30)
    assert bench_train_size.cut_to_memory(config, arch, on_cpu, memory_bytes).num_layers == arch.num_layers == 24
    assert bench_train_size.cut_to_memory(config_of("what=train"), arch, on_cpu, memory_bytes).num_layers == 12


def test_the_timed_optimizer_is_the_one_that_is_asked_for(on_cpu):
    arm = next(bench_train_arms.arms((64,)))
    state = bench_train.make_state(_config("optim=adamw8bit"), smallest(), on_cpu, arm)
    assert rank_states(state.optimizer)
    assert not rank_states(bench_train.make_state(_config(), smallest(), on_cpu, arm).optimizer)


def test_a_long_warm_up_is_one(on_cpu):
    arm = next(bench_train_arms.arms((64,)))
    config = _config("optim.warmup_steps=2000", "optim.lr=1e-3")
    scheduler = bench_train.make_state(config, smallest(), on_cpu, arm).scheduler
    scheduler.step(1000)
    rates = [group["lr"] for group in scheduler.optimizer.param_groups]
    assert rates == pytest.approx([0.5e-3] * len(rates))


def test_the_model_is_built_for_the_optimizer(on_cpu, monkeypatch: pytest.MonkeyPatch):
    class Seen(Exception):
        pass

    def build(arch: Architecture, settings: ModelSettings, *_: object, **__: object) -> None:
        raise Seen(settings.fused_weight_gradients, settings.expert_bias_rate)

    arm = next(bench_train_arms.arms((64,)))
    monkeypatch.setattr(bench_train, "build_model", build)
    for arguments, expected in (
        ((), (False, 1e-3)),
        (("optim.fused=apex", "optim.expert_bias_rate=2e-3"), (True, 2e-3)),
    ):
        with pytest.raises(Seen) as seen:
            bench_train.make_state(_config(*arguments), smallest(), on_cpu, arm)
        assert seen.value.args == expected


def test_a_gpu_is_needed():
    from bailing_mtp.config import check_backends

    with pytest.raises(ConfigError, match="what: 'train' needs a CUDA device"):
        check_backends(config_of("what=train"), has_gpu=False)
