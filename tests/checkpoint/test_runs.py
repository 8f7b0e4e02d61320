"""Runs of one process: what their checkpoints carry, and what starts afresh."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bailing_mtp.config import CheckpointConfig, ConvertConfig
from bailing_mtp.errors import UserError
from bailing_mtp.training.optimizer_state import generator_states, set_generator_states
from bailing_mtp.weights.fresh import init_fresh
from bailing_mtp.weights.names import Shard
from recipes import convert, resume
from recipes.checkpoints import tell_fresh_mtp
from recipes.session import find_source, make_model, require_mtp
from tests.distributed.cases_checkpoint import Run
from tests.distributed.worlds import FIXTURES, layout
from tests.weights.stand_in import assert_same_bytes, build, state, stored

MOE = FIXTURES / "moe"
MTP = "model.layers.5."


def export(checkpoint: Path, target: Path) -> dict[str, torch.Tensor]:
    convert.main(ConvertConfig(source=str(checkpoint), target=str(target), format="hf"))
    return stored(target)


def test_the_untrained_mtp_layer_travels_with_every_checkpoint(tmp_path: Path) -> None:
    """Through a save, a save that prunes the first, a continued run and an export: the same bytes."""
    whole = stored(MOE)
    mtp = {name: tensor for name, tensor in whole.items() if name.startswith(MTP)}
    root = tmp_path / "run" / "checkpoints"
    with layout(tp=1, ep=1) as context:
        first = Run(tmp_path / "run", context, mtp=False, save_every=1)
        assert first.state.mtp is None
        first.train(2)
        first.finish_save()
        again = Run(tmp_path / "run", context, mtp=False, save_every=1)
        assert again.source.directory == root / "step_2"
        again.train(3)
        again.finish_save()
    assert sorted(path.name for path in root.iterdir()) == ["latest", "step_3"]
    exported = export(root / "step_3", tmp_path / "hf")
    assert exported.keys() == whole.keys()
    assert_same_bytes({name: exported[name] for name in mtp}, mtp)
    assert {n: t.dtype for n, t in exported.items()} == {n: t.dtype for n, t in whole.items()}
    assert not torch.equal(exported["lm_head.weight"], whole["lm_head.weight"])
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["num_nextn_predict_layers"] == 1


def without_mtp(directory: Path) -> Path:
    directory.mkdir()
    tensors = {name: tensor for name, tensor in stored(MOE).items() if not name.startswith(MTP)}
    save_file(tensors, str(directory / "model.safetensors"))
    (directory / "config.json").write_text((MOE / "config.json").read_text())
    return directory


class Notes:
    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def note(self, values: dict[str, float]) -> None:
        self.values |= values


def test_a_fresh_mtp_layer_is_random_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lacking = without_mtp(tmp_path / "hf")
    with layout(tp=1, ep=1) as context:
        run = Run(tmp_path / "run", context)
        checkpoint = CheckpointConfig(load=str(lacking), allow_fresh_mtp=True)
        config = run.config.model_copy(update={"checkpoint": checkpoint, "seed": 7})
        source = require_mtp(find_source(config), config, 0.3)
        built = make_model(config, source, context, with_mtp=True)
        (tmp_path / "run").mkdir(exist_ok=True)
        notes = Notes()
        tell_fresh_mtp(config, source, context, notes)
    _, expected = build(source.arch, dtype=torch.float32)
    init_fresh(source.arch, Shard(), None, expected, seed=7)
    found = dict(built.mtp.named_parameters())
    assert all(torch.equal(found[name], tensor) for name, tensor in state(expected).items() if name in found)
    trunk = dict(built.trunk.named_parameters())
    assert torch.equal(trunk["decoder.final_layernorm.weight"], stored(MOE)["model.norm.weight"].float())
    assert notes.values == {"mtp/fresh_tensors": 67.0}
    told = f"the MTP layer starts from random weights: {lacking} lacks 67 of its tensors"
    assert told in capsys.readouterr().err
    assert told in (tmp_path / "run" / "config.resolved.yaml").read_text()


def test_another_data_position_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with layout(tp=1, ep=1) as context:
        run = Run(tmp_path / "run", context, save_every=1)
        run.train(1)
        run.finish_save()

        def refuses(self: object, values: object) -> None:
            raise ValueError("seed was 0, now 1")

        monkeypatch.setattr("tests.distributed.cases_checkpoint.Position.load_state_dict", refuses)
        with pytest.raises(UserError, match="step_1: seed was 0, now 1"):
            Run(tmp_path / "run", context, save_every=1)


def test_lost_optimizer_state_is_an_error(tmp_path: Path) -> None:
    """A checkpoint that lacks a moment of one parameter does not continue with zeros."""
    with layout(tp=1, ep=1) as context:
        run = Run(tmp_path / "run", context, save_every=1)
        run.train(1)
        run.finish_save()
        source = find_source(run.config, resumes=True)
        del source.sharded.index["optimizer.exp_avg_sq.lm_head.weight"]
        with pytest.raises(UserError, match=r"holds no optimizer state optimizer\.exp_avg_sq\.lm_head\.weight"):
            resume.continue_run(source, run.state, run.data)


def test_generators_continue() -> None:
    import random

    import numpy as np

    with layout(tp=1, ep=1):
        states = json.loads(json.dumps(generator_states()))
        drawn = [torch.rand(3).tolist(), random.random(), np.random.rand(3).tolist()]
        torch.rand(5), random.random(), np.random.rand(2)
        set_generator_states(states)
        assert [torch.rand(3).tolist(), random.random(), np.random.rand(3).tolist()] == drawn
