"""Reward functions: reasoning-gym's verifiers, math-verify, exact match, or the user's own.

A reward is `reward(sample: dict) -> float`; the sample has `prompt` and `response` (texts), `answer` (of the data
line, or None) and `record` (the data line). This module is imported by reward processes and loads nothing heavy.
"""

from __future__ import annotations

import functools
import importlib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from bailing_mtp.errors import UserError

Sample = Mapping[str, Any]
Reward = Callable[[dict[str, Any]], float]

_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_THOUGHT_END = "</think>"


class RewardRefused(ValueError):
    """A sample that this reward cannot judge, such as one without an answer."""


def resolve(name: str) -> Reward:
    """The reward called `name`: reasoning_gym, math_verify, exact, or module:function.

    Raises UserError for a module or function that is not there.
    """
    built_in = {"reasoning_gym": reasoning_gym, "math_verify": math_verify, "exact": exact}
    if name in built_in:
        return built_in[name]
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(f"rl.reward: {name}: cannot import {module_name} ({error})") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UserError(f"rl.reward: {name}: {module_name} has no function {function_name}")
    return function


def checked(reward: Reward, sample: dict[str, Any]) -> float:
    """The reward as a float. Raises RewardRefused where it is no finite number."""
    value = reward(sample)
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise RewardRefused(f"the reward is a {type(value).__name__}; allowed: a number")
    number = float(value)
    if not math.isfinite(number):
        raise RewardRefused(f"the reward is {number}; allowed: a finite number")
    return number


def final_answer(response: str) -> str:
    """What a response answers: after its thoughts, the last <answer>...</answer>, else all of it."""
    said = response.rpartition(_THOUGHT_END)[2]
    tagged = _ANSWER_TAG.findall(said)
    return (tagged[-1] if tagged else said).strip()


def exact(sample: dict[str, Any]) -> float:
    """1 if the response, without white space around it, is the answer."""
    return float(sample["response"].strip() == _answer(sample).strip())


def reasoning_gym(sample: dict[str, Any]) -> float:
    """The score of the task that the record's metadata names as its source_dataset, in [0, 1]."""
    record = sample["record"]
    return float(_scorer(_task(record))(final_answer(sample["response"]), record))


def math_verify(sample: dict[str, Any]) -> float:
    """1 if the response's last mathematical value equals the answer (LaTeX or plain)."""
    library = importlib.import_module("math_verify")
    answer = _answer(sample)
    gold = library.parse(f"${answer.strip().strip('$')}$") or library.parse(answer)
    if not gold:
        raise RewardRefused(f"the answer {answer!r} is no mathematical value")
    return float(library.verify(gold, library.parse(final_answer(sample["response"]))))


def require_judgeable(name: str, record: Mapping[str, Any]) -> None:
    """Raise RewardRefused for a data line that lacks what the built-in reward `name` compares a response with."""
    if name == "reasoning_gym":
        _task(record)
    elif name in ("exact", "math_verify"):
        _answer({"answer": record.get("answer")})


def _task(record: Mapping[str, Any]) -> str:
    metadata = record.get("metadata")
    task = metadata.get("source_dataset") if isinstance(metadata, Mapping) else None
    if task is None or "answer" not in record:
        raise RewardRefused("the record is no reasoning_gym entry: it needs answer and metadata.source_dataset")
    return task


@functools.cache
def _scorer(task: str) -> Callable[[str, Any], float]:
    factory = importlib.import_module("reasoning_gym.factory")
    if task not in factory.DATASETS:
        raise RewardRefused(f"metadata.source_dataset: {task!r} is no reasoning_gym task")
    return factory.get_score_answer_fn(task)


def _answer(sample: Sample) -> str:
    answer = sample["answer"]
    if answer is None:
        raise RewardRefused('the data line has no "answer"')
    return str(answer)
