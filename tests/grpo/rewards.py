"""Rewards for tests: functions of the response alone."""

from typing import Any


def digits(sample: dict[str, Any]) -> float:
    """Share of digits and of the letter e."""
    return sum(c in "0123456789e" for c in sample["response"]) / max(1, len(sample["response"]))
