"""A model that is named beside a checkpoint must be the checkpoint's own."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from bailing_mtp.config import ConfigError
from bailing_mtp.contracts.architecture import Architecture


def require_same_sizes(given: Mapping[str, Any], held: Architecture, directory: Path) -> None:
    """Refuse `model.architecture` where it is not what `directory` holds: its sizes would not be used.

    Whether there is an MTP layer is left to the files. Raises ConfigError that names every difference.
    """
    as_held = {**given, "num_nextn_predict_layers": held.num_mtp_layers}
    wanted = Architecture.from_hf(as_held, "model.architecture", strict=True)
    names = [field.name for field in fields(Architecture) if field.compare]
    both = ((name, getattr(wanted, name), getattr(held, name)) for name in names)
    told = ", ".join(f"{name} {mine} against {theirs}" for name, mine, theirs in both if mine != theirs)
    if told:
        raise ConfigError(
            f"model.architecture: is not that of checkpoint.load={directory} ({told}); allowed with a checkpoint: "
            "model=checkpoint, which reads its sizes, or the same sizes"
        )
