"""Every error that a user can mend ends a run with its message alone."""

from pathlib import Path

import pytest

from bailing_mtp.contracts.hf_config import UnsupportedArchitecture
from bailing_mtp.data.packing import check_pack_sizes
from bailing_mtp.data.shards import ShardError
from bailing_mtp.data.sources import BadDocument, open_source
from bailing_mtp.data.tokenizer import load_tokenizer, train_tokenizer
from bailing_mtp.errors import UserError
from bailing_mtp.weights.checkpoint_files import CheckpointError
from recipes.failure import user_errors
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
