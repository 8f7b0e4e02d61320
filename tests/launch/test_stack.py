"""The measured stack: installed on request, and a GPU run without it says so in one line."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

import pytest

from bailing_mtp.config import GenerateConfig
from recipes import common
from recipes.ranks import Ranks
from recipes.stack import MEASURED, pins, stack_note
from tests.launch.test_launch import ROOT, program, script


def test_pins_are_what_setup_allows():
    found = pins(MEASURED.read_text())
    assert {"torch", "triton", "fla-core", "megatron-core"} <= set(found)
    needed = (ROOT / "setup.cfg").read_text()
    assert f"fla-core=={found['fla-core']}" in needed and f"megatron-core=={found['megatron-core']}" in needed


def test_every_difference_is_named_in_one_line(tmp_path: Path):
    file = tmp_path / "measured.txt"
    file.write_text("# a stack\ntorch==2.11.0\n\ntriton==3.6.0  # with it\nfla-core==0.6.0\n")
    have = {"torch": "2.11.0+cu130", "triton": "3.6.0", "fla-core": "0.6.0"}
    assert stack_note(have.__getitem__, file) is None

    def other(name: str) -> str:
        if name == "fla-core":
            raise metadata.PackageNotFoundError(name)
        return {"torch": "2.14.1", "triton": "3.6.0"}[name]

    assert stack_note(other, file) == (
        "warning: not the measured stack of measured.txt: torch 2.14.1 (measured: 2.11.0), "
        "fla-core absent (measured: 0.6.0); kernels may be slower, or fail"
    )


@pytest.mark.parametrize("has_gpu", [True, False])
def test_only_gpu_runs_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, has_gpu: bool
):
    monkeypatch.setattr(common, "_has_gpu", lambda: has_gpu)
    monkeypatch.setattr(common, "stack_note", lambda: "warning: not the measured stack")
    arguments = ["checkpoint.load=x", "prompts=a.jsonl", "output=b.jsonl", f"run_dir={tmp_path / 'run'}"]
    assert common.prepare(GenerateConfig, "generate", arguments, Ranks.from_environment()) is not None
    assert capsys.readouterr().out.count("not the measured stack") == has_gpu


def test_install_takes_constraints_and_installs_again_for_others(tmp_path: Path):
    venv = tmp_path / "venv"
    (tmp_path / "pins.txt").write_text("torch==2.11.0\n")
    makes = 'if [ "$2" = venv ]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"'
    fake = f'{makes}; else echo "$@" >> {tmp_path}/calls; fi'
    program(tmp_path / "bin" / "python3.12", f'[ "$1" = -c ] && echo {tmp_path}/bin/fake || exit 1')
    program(tmp_path / "bin" / "fake", fake)
    program(tmp_path / "bin" / "df", 'echo header; echo "disk 0 0 99999999 1% /"')
    path = f"{tmp_path}/bin:/usr/bin:/bin"
    for constraints, calls in (("pins.txt", 1), ("pins.txt", 1), ("", 2), ("", 2)):
        run = script("install.sh", str(venv), cwd=tmp_path, PATH=path, CONSTRAINTS=constraints)
        assert run.returncode == 0, run.stderr
        lines = (tmp_path / "calls").read_text().splitlines()
        assert len(lines) == calls
    assert f"--constraint {tmp_path}/pins.txt" in lines[0] and "--constraint" not in lines[1]
    assert (venv / ".dependencies").read_text().strip() == hashlib.sha256((ROOT / "setup.cfg").read_bytes()).hexdigest()
    missing = script("install.sh", str(venv), cwd=tmp_path, PATH=path, CONSTRAINTS="none.txt")
    assert missing.returncode == 1 and "error: CONSTRAINTS=none.txt: no such file" in missing.stderr
