"""Files that a verb writes at its end: found to be writable at its start."""

import tempfile
from pathlib import Path

from bailing_mtp.config import ConfigError, show

from .ranks import Ranks


def require_writable(key: str, file: str) -> None:
    """Make the file's directory and refuse, before anything is loaded, what could not be written there.

    Rank 0 only; others return at once. Raises ConfigError that names `key`.
    """
    if not Ranks.from_environment().is_first:
        return
    path = Path(file)
    if path.is_dir():
        raise ConfigError(f"{key}: {show(file)} is a directory; name a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"{key}: {show(file)} cannot be written ({error.strerror}); name a file in a directory that can be"
        ) from None
