"""Hydra composes, and nothing else: conf/*.yaml and overrides in, one plain dict out."""

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bailing_mtp.config import (
    ConfigError,
    Section,
    UserError,
    key_paths,
    schema_defaults,
    text_keys,
    unknown_key,
)

CONF = Path(__file__).resolve().parents[1] / "conf"
MISSING = "???"
# Keys below these are the model's own, checked where the architecture is read.
FREE_FORM = ("model.architecture.",)
# Run directory and resolved config are this package's business, after validation.
HYDRA_WRITES_NOTHING = (
    "hydra.run.dir=.",
    "hydra.output_subdir=null",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
)


def compose(
    config_cls: type[Section], config_name: str, arguments: list[str], **defaults: Any
) -> dict[str, Any] | None:
    """Compose conf/<config_name>.yaml with command-line `arguments` into a plain dict of unvalidated values.

    The base of every composition is the schema itself with `defaults` put over it, so each key can be
    overridden without a plus sign and no default stands twice. Keys without a value are absent.
    Returns None where the arguments only asked for information (--help, --cfg job).
    Raises UserError with Hydra's own message, ConfigError for an override of an unknown key.
    """
    _check_arguments(config_cls, arguments)
    base = schema_defaults(config_cls, required=MISSING) | defaults
    ConfigStore.instance().store(name=f"{config_name}_schema", node=base)
    composed = _hydra_main(config_name, _quote_texts(config_cls, arguments))
    if composed is None:
        return None
    try:
        plain = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    return _without_missing(plain)


def _hydra_main(config_name: str, arguments: list[str]) -> DictConfig | None:
    """Run hydra.main for its composition and its flags; its messages become a UserError."""
    composed: list[DictConfig] = []
    main = hydra.main(version_base="1.3", config_path=str(CONF), config_name=config_name)(composed.append)
    messages = io.StringIO()
    saved = sys.argv
    # Hydra's parser wants all overrides side by side.
    overrides = [index for index, argument in enumerate(arguments) if _is_override(argument)]
    at = overrides[0] if overrides else len(arguments)
    sys.argv = [saved[0], *arguments[:at], *HYDRA_WRITES_NOTHING, *arguments[at:]]
    try:
        with contextlib.redirect_stderr(messages):
            main()
    except SystemExit as end:
        if end.code:
            raise UserError(_tidy(messages.getvalue())) from None
        raise
    finally:
        sys.argv = saved
    return composed[0] if composed else None


def _check_arguments(config_cls: type[Section], arguments: list[str]) -> None:
    """Refuse what Hydra would accept or explain badly: sweeps, and overrides of keys that do not exist."""
    if "-m" in arguments or "--multirun" in arguments:
        raise UserError("--multirun: a run owns its process group; start one command per value")
    known = set(key_paths(config_cls))
    groups = {path.name for path in CONF.iterdir() if path.is_dir()}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        key = key.lstrip("+~")
        if equals and key in groups and value in ("", "null"):
            choices = sorted(path.stem for path in (CONF / key).glob("[!_]*.yaml"))
            raise ConfigError(f"{key}: {value or 'nothing'} is no choice; use one of {', '.join(choices)}")
        is_plain = _is_override(argument) and "/" not in key and "@" not in key
        if not is_plain or key.split(".")[0] == "hydra" or key in groups or key.startswith(FREE_FORM):
            continue
        if key not in known:
            raise ConfigError(unknown_key(config_cls, key))


def _is_override(argument: str) -> bool:
    return "=" in argument and not argument.startswith("-")


def _quote_texts(config_cls: type[Section], arguments: list[str]) -> list[str]:
    """Quote the values of text keys, so that commas, equals signs and numbers in a path stay text.

    Hydra would read `data.path=reasoning_gym:a,b` as a sweep over two values.
    """
    texts = text_keys(config_cls)
    quoted = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        usable = [quote for quote in "'\"" if quote not in value]
        is_quoted = value[:1] in ("'", '"') and value[:1] == value[-1:]
        if equals and key.lstrip("+") in texts and value not in ("", "null") and usable and not is_quoted:
            argument = f"{key}={usable[0]}{value}{usable[0]}"
        quoted.append(argument)
    return quoted


def _without_missing(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    return {key: _without_missing(value) for key, value in node.items() if value != MISSING}


def _tidy(text: str) -> str:
    """Hydra's message without its hints about stack traces, search paths and private files."""
    hints = ("Set the environment variable HYDRA_FULL_ERROR", "To append to your config use", "\t_")
    body = text.partition("Config search path:")[0]
    return "\n".join(line for line in body.splitlines() if line.strip() and not line.startswith(hints))
