"""The same warnings of pinned packages are silent in a run and in the tests."""

import logging
import tomllib
import warnings

from recipes import CHATTER, LOGGED, be_quiet
from tests.house.source import ROOT


def test_pytest_ignores_what_a_run_ignores():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert settings["filterwarnings"] == [
        f"ignore:{message}:{category.__name__}" for message, category in CHATTER
    ]


def test_only_the_known_messages_are_silent():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        be_quiet()
        warnings.warn("absl.logging is not installed. Using another one", UserWarning, stacklevel=1)
        warnings.warn("a new warning", UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in shown] == ["a new warning"]
    for name, part in LOGGED.items():
        texts = (f"{part}, and so on", "something new")
        records = [logging.LogRecord(name, logging.WARNING, "", 0, text, (), None) for text in texts]
        assert [bool(logging.getLogger(name).filter(record)) for record in records] == [False, True]
