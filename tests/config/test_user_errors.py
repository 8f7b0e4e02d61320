"""Every error that a user can mend ends a run with its message alone."""

import errno
import re
from pathlib import Path

import pytest

from bailing_mtp.config import ConfigError, GenerateConfig, ScoreConfig, build_config, show
from bailing_mtp.contracts.hf_config import UnsupportedArchitecture
from bailing_mtp.data.packing import check_pack_sizes
from bailing_mtp.data.shards import ShardError
from bailing_mtp.data.sources import BadDocument, open_source
from bailing_mtp.data.tokenizer import load_tokenizer, train_tokenizer
from bailing_mtp.errors import UserError
from bailing_mtp.weights.checkpoint_files import CheckpointError
from recipes.failure import user_errors
from recipes.outputs import require_writable
from recipes.ranks import Ranks

FIRST = Ranks(rank=0, world_size=1, host="here")


def ended(capsys: pytest.CaptureFixture[str], mistake) -> str:
    with pytest.raises(SystemExit) as end, user_errors(FIRST):
        mistake()
    assert end.value.code == 1
    return capsys.readouterr().err


@pytest.mark.parametrize("kind", [UnsupportedArchitecture, ShardError, BadDocument, CheckpointError])
def test_kinds(kind: type[Exception]):
    assert issubclass(kind, UserError)


def test_data_mistakes(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{}")
    mistakes = {
        "error: data.path: reasoning_gym:a,a; allowed": lambda: open_source("reasoning_gym:a,a"),
        f"error: data.path: {tmp_path}/x does not exist; allowed: a .txt": lambda: open_source(f"{tmp_path}/x"),
        "error: data.seq_tokens: 9 is not supported": lambda: check_pack_sizes(8, 9),
        "error: vocab_size: 9; allowed": lambda: train_tokenizer(["a"], 9),
        f"error: no tokenizer at {tmp_path}/none; allowed": lambda: load_tokenizer(tmp_path / "none"),
        f"error: {tmp_path}/tokenizer.json: has no 'model'": lambda: load_tokenizer(tmp_path),
    }
    for message, mistake in mistakes.items():
        assert ended(capsys, mistake).startswith(message)


def test_the_systems_file_errors_name_the_file(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    message = ended(capsys, lambda: (tmp_path / "none").read_text())
    assert message == f"error: {tmp_path}/none: No such file or directory\n"


def test_a_disk_that_takes_nothing_is_named_and_other_failures_keep_their_traceback(capsys: pytest.CaptureFixture[str]):
    def refuse(*names: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system", *names)

    assert ended(capsys, lambda: refuse("/disk/run")) == "error: /disk/run: Read-only file system\n"
    assert ended(capsys, refuse) == "error: Read-only file system\n"
    with pytest.raises(OSError, match="broken"), user_errors(FIRST):
        raise OSError(errno.EIO, "broken")


def test_an_output_that_cannot_be_written_is_refused_by_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("kept")
    for name, why in (("", "is a directory; name a file"), ("file/out", r"cannot be written \(.+\); name a file in")):
        with pytest.raises(ConfigError, match=f"^output: {re.escape(show(str(tmp_path / name)))} {why}"):
            require_writable("output", str(tmp_path / name))
    require_writable("output", str(tmp_path / "file"))
    require_writable("output", str(tmp_path / "new" / "out"))
    assert (tmp_path / "file").read_text() == "kept" and not any((tmp_path / "new").iterdir())
    # The first rank writes, so it alone looks.
    monkeypatch.setenv("RANK", "1")
    require_writable("output", str(tmp_path))


@pytest.mark.parametrize(("cls", "key"), [(ScoreConfig, "input"), (GenerateConfig, "prompts")])
def test_an_output_is_never_the_input_by_another_name(tmp_path: Path, cls: type, key: str):
    values = {"run_dir": "r", "checkpoint": {"load": "c"}, key: f"{tmp_path}/a", "output": f"{tmp_path}/x/../a"}
    with pytest.raises(ConfigError, match="^output: .*; name another file"):
        build_config(cls, values)
