"""convert: every tensor there and back, byte for byte, in little memory; targets are never written over."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bailing_mtp.config import ConvertConfig
from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.weights.check import check_tensors
from bailing_mtp.weights.checkpoint_files import open_checkpoint
from bailing_mtp.weights.passed import write_passed_through
from bailing_mtp.weights.sharded.chunks import ChunkWriter, write_index
from bailing_mtp.weights.sharded.manifest import write_manifest
from bailing_mtp.weights.stored import CheckpointError
from recipes import convert
from tests.weights.stand_in import FIXTURES, assert_same_bytes, stored, tiny_config, write_checkpoint, write_tensors

ROOT = Path(__file__).resolve().parents[2]


def run(source: Path, target: Path, kind: str, max_shard_bytes: int = 1000) -> None:
    convert.main(ConvertConfig(source=str(source), target=str(target), format=kind, max_shard_bytes=max_shard_bytes))


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_there_and_back_is_byte_equal(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(FIXTURES / kind, tmp_path / "sharded", "sharded", 1_000_000)
    run(tmp_path / "sharded", tmp_path / "hf", "hf", 1_000_000)
    assert_same_bytes(stored(tmp_path / "hf"), stored(FIXTURES / kind))
    config = json.loads((FIXTURES / kind / "config.json").read_text())
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == config
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    n_tensors = len(stored(tmp_path / "hf"))
    assert f"{n_tensors} tensors" in capsys.readouterr().out


@pytest.mark.parametrize("n_mtp", [0, 1])
def test_config_says_what_the_files_hold(tmp_path: Path, n_mtp: int) -> None:
    """A config that promises an MTP layer which is not there does not get through."""
    tensors = write_checkpoint(tmp_path / "hf", tiny_config(num_nextn_predict_layers=n_mtp))
    write_tensors(tmp_path / "claims", tiny_config(num_nextn_predict_layers=1), tensors)
    run(tmp_path / "claims", tmp_path / "sharded", "sharded")
    run(tmp_path / "sharded", tmp_path / "back", "hf")
    assert json.loads((tmp_path / "sharded" / "config.json").read_text())["num_nextn_predict_layers"] == n_mtp
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == n_mtp
    assert_same_bytes(stored(tmp_path / "back"), tensors)


@pytest.mark.parametrize("lost", ["model.norm.weight", "model.layers.3.eh_proj.weight"])
def test_a_missing_tensor_is_named_and_nothing_written(tmp_path: Path, lost: str) -> None:
    tensors = write_checkpoint(tmp_path / "hf", tiny_config())
    write_tensors(tmp_path / "bad", tiny_config(), {n: t for n, t in tensors.items() if n != lost})
    for kind in ("hf", "sharded"):
        with pytest.raises(CheckpointError, match=lost):
            run(tmp_path / "bad", tmp_path / "target", kind)
    assert not (tmp_path / "target").exists() and not list(tmp_path.glob(".*"))


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path / "hf", tiny_config())
    write_tensors(tmp_path / "bad", tiny_config(), tensors | {"model.extra": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"not in this model:\n  model\.extra"):
        run(tmp_path / "bad", tmp_path / "target", "hf")


@pytest.mark.parametrize("kind", ["hf", "sharded"])
def test_an_existing_target_is_refused_untouched(tmp_path: Path, kind: str) -> None:
    write_checkpoint(tmp_path / "hf", tiny_config())
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "mine").write_text("keep")
    with pytest.raises(CheckpointError, match="target: exists and is not an empty directory"):
        run(tmp_path / "hf", tmp_path / "target", kind)
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["mine"]


def test_damaged_checkpoint_is_not_converted(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf", tiny_config())
    run(tmp_path / "hf", tmp_path / "sharded", "sharded")
    file = tmp_path / "sharded" / "__0_2.distcp"
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(CheckpointError, match=r"__0_2\.distcp: its bytes changed"):
        run(tmp_path / "sharded", tmp_path / "back", "hf")


def test_tokenizer_files_go_along(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf", tiny_config())
    (tmp_path / "hf" / "tokenizer.json").write_text('{"model": {}}')
    run(tmp_path / "hf", tmp_path / "sharded", "sharded")
    run(tmp_path / "sharded", tmp_path / "back", "hf")
    assert (tmp_path / "back" / "tokenizer.json").read_text() == '{"model": {}}'


def test_passed_through_layer_is_exported_untouched(tmp_path: Path) -> None:
    """What a run with the MTP loss off stores: its own trunk, in fp32 here, and the source's MTP layer."""
    tensors = write_checkpoint(tmp_path / "hf", tiny_config())
    source = open_checkpoint(tmp_path / "hf")
    arch = Architecture.from_hf(source.config, "test")
    run(tmp_path / "hf", tmp_path / "step_1", "sharded", 10**9)
    step, sharded = tmp_path / "step_1", open_checkpoint(tmp_path / "step_1").sharded
    with ChunkWriter(step / "__0_0.distcp") as writer:
        for key, chunks in sharded.index.items():
            if "layers.3." not in key:
                for chunk in chunks:
                    writer.put(key, chunk.shape, chunk.offset, torch.full(chunk.sizes, 0.5))
        writer.finish()
    write_index(step, writer.chunks)
    write_passed_through(source, arch, step)
    (step / "manifest.json").unlink()
    write_manifest(step, {})
    assert check_tensors(open_checkpoint(step), arch).mtp_complete
    run(step, tmp_path / "back", "hf")
    back = stored(tmp_path / "back")
    assert back.keys() == tensors.keys()
    mtp = {name for name in tensors if name.startswith("model.layers.3.")}
    assert len(mtp) > 20
    assert_same_bytes({n: back[n] for n in mtp}, {n: tensors[n] for n in mtp})
    assert all(torch.equal(back[n], torch.full_like(tensors[n], 0.5)) for n in tensors.keys() - mtp)
    assert {n: t.dtype for n, t in back.items()} == {n: t.dtype for n, t in tensors.items()}
    run(tmp_path / "back", tmp_path / "again", "sharded")
    next_step = tmp_path / "next"
    next_step.mkdir()
    write_passed_through(open_checkpoint(step), arch, next_step)
    copied = load_file(str(next_step / "passed_through.safetensors"))
    assert_same_bytes(copied, {n: tensors[n] for n in mtp})


MEASURE = """
import resource, sys
from bailing_mtp.config import ConvertConfig
from recipes import convert
def run(source, target, format, max_bytes=10**9):
    convert.main(ConvertConfig(source=source, target=target, format=format, max_shard_bytes=max_bytes))
small, source, target, max_bytes = sys.argv[1:]
run(small, small + "_sharded", "sharded")
run(small + "_sharded", small + "_hf", "hf")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(source, target + "/sharded", "sharded", int(max_bytes))
run(target + "/sharded", target + "/hf", "hf", int(max_bytes))
print("grown", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_memory_stays_below_the_largest_file(tmp_path: Path) -> None:
    """A model of 90 MB in files of at most 12 MB; the process may grow by 1.3 times the largest file."""
    config = tiny_config(
        vocab_size=4096, hidden_size=1024, head_dim=64, v_head_dim=64, intermediate_size=512,
        moe_intermediate_size=400, qk_nope_head_dim=64, qk_rope_head_dim=32,
    )  # fmt: skip
    write_checkpoint(tmp_path / "one_file", config)
    write_checkpoint(tmp_path / "small", tiny_config())
    arguments = [str(tmp_path / "small"), str(tmp_path / "one_file"), str(tmp_path), "12000000"]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    grown = int(done.stdout.rpartition("grown ")[2])
    for target, pattern in (("sharded", "*.distcp"), ("hf", "*.safetensors")):
        sizes = [path.stat().st_size for path in (tmp_path / target).glob(pattern)]
        assert sum(sizes) > 80_000_000 and len(sizes) > 7
        assert grown <= 1.3 * max(sizes), f"grew by {grown / 1e6:.1f} MB, files of {max(sizes) / 1e6:.1f} MB"
