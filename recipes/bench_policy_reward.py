"""A reward that knows nothing, for measuring what comes around it. Imported by reward processes: keep it light."""

import zlib
from typing import Any


def coin(sample: dict[str, Any]) -> float:
    """0 or 1 by the response's text, so that samples of a prompt differ."""
    return float(zlib.crc32(sample["response"].encode()) & 1)
