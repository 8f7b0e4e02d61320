"""A recipe with an empty body, started by the tests as a program of its own."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bailing_mtp.config import PretrainConfig, UserError
from recipes.common import run
from recipes.ranks import Ranks


def main(config: PretrainConfig) -> None:
    """Fail as the data path says, else print one line."""
    if config.data.path == "missing":
        Path("no/such/file").read_text()
    if config.data.path == "bug":
        raise ZeroDivisionError("a programmer's error")
    if config.data.path == "second_rank" and not Ranks.from_environment().is_first:
        raise UserError("data.path: only this rank cannot read it")
    print(f"ran {config.train.steps} steps", flush=True)


if __name__ == "__main__":
    run(main, PretrainConfig, "pretrain")
