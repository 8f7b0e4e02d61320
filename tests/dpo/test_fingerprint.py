"""A checkpoint's fingerprint follows its weights, not its place."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bailing_mtp.weights import fingerprint
from bailing_mtp.weights.fingerprint import weights_fingerprint
from tests.weights.stand_in import tiny_config, write_checkpoint, write_tensors


def test_follows_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With samples far smaller than the file, as for a real checkpoint."""
    monkeypatch.setattr(fingerprint, "HEAD_BYTES", 512)
    monkeypatch.setattr(fingerprint, "SAMPLE_BYTES", 16)
    tensors = write_checkpoint(tmp_path / "a", tiny_config())
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "tokenizer.json").write_text("{}")
    first = weights_fingerprint(tmp_path / "a")
    assert weights_fingerprint(tmp_path / "b") == first
    write_tensors(tmp_path / "c", tiny_config(), {name: t * 1.01 for name, t in tensors.items()})
    sizes = {(tmp_path / name / "model.safetensors").stat().st_size for name in "ac"}
    assert len(sizes) == 1
    assert weights_fingerprint(tmp_path / "c") != first
