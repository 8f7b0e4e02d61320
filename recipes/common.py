"""What every recipe does before its own first line: compose, validate, refuse, claim run_dir, print.

A recipe ends with `run(main, PretrainConfig, "pretrain")`.
"""

import sys
from collections.abc import Callable

from bailing_mtp.config import RunConfig, Section, UserError, build_config, check_backends, show

from .compose import compose
from .failure import user_errors
from .ranks import Ranks
from .rundir import check_run_dir, default_run_dir, open_run_dir, require_run_dir, withdraw_run_dir
from .stack import stack_note


def run[ConfigT: RunConfig](
    verb_main: Callable[[ConfigT], None], config_cls: type[ConfigT], config_name: str
) -> None:
    """Run `verb_main(config)` with the config that conf/<config_name>.yaml and the command line compose.

    The same under `python -m` and under torchrun: all ranks compose the same; only rank 0 writes or prints.
    Every user error ends the process with exit code 1 and one message; other exceptions keep their traceback.
    """
    ranks = Ranks.from_environment()
    with user_errors(ranks):
        config = prepare(config_cls, config_name, sys.argv[1:], ranks)
        if config is None:
            return
        try:
            verb_main(config)
        except (UserError, OSError):
            if ranks.is_first:
                withdraw_run_dir(config)
            raise


def prepare[ConfigT: RunConfig](
    config_cls: type[ConfigT], config_name: str, arguments: list[str], ranks: Ranks
) -> ConfigT | None:
    """Everything of `run` before the verb: returns the config in force, or None after --help or --cfg job."""
    plain = compose(config_cls, config_name, arguments, run_dir=default_run_dir(config_name, ranks))
    if plain is None:
        return None
    require_run_dir(plain, ranks)
    config = build_config(config_cls, plain)
    has_gpu = _has_gpu()
    check_backends(config, has_gpu=has_gpu)
    if ranks.is_first:
        # Only here: another rank could look after this one has already written.
        notes = check_run_dir(config)
        notes += [f"changed: {line}" for line in open_run_dir(config)]
        note = stack_note() if has_gpu else None
        notes += [] if note is None else [note]
        print(in_force(config, config_name, ranks), flush=True)
        for note in notes:
            print(f"  {note}", flush=True)
    return config


def in_force(config: RunConfig, verb: str, ranks: Ranks) -> str:
    """The values that the run uses, one line per section."""
    lines = [f"{verb}: {ranks.world_size} rank(s), run_dir={config.run_dir}, seed={config.seed}"]
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, Section):
            keys = (f"{key}={_brief(getattr(value, key))}" for key in type(value).model_fields)
            lines.append(f"  {name}: {' '.join(keys)}")
        elif name not in ("run_dir", "seed"):
            lines.append(f"  {name}: {show(value)}")
    return "\n".join(lines)


def _brief(value: object) -> str:
    if isinstance(value, dict):
        return f"<{len(value)} keys>"
    return value if isinstance(value, str) else show(value)


def _has_gpu() -> bool:
    # torch is slow to import; a mistake in the config is reported before it.
    import torch

    return torch.cuda.is_available()
