"""What the rewards say about hand-written responses, and what the pool makes of bad ones."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from bailing_mtp.errors import UserError
from bailing_mtp.rl.reward_pool import RewardPool
from bailing_mtp.rl.rewards import RewardRefused, checked, exact, final_answer, math_verify, reasoning_gym, resolve

OWN = "tests.rl.own_rewards"


def sample(response: str, answer: object = None, record: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"prompt": "?", "response": response, "answer": answer, "record": record or {}}


def test_final_answer():
    assert final_answer("so <answer> 1 </answer>, no: <answer>\n2\n</answer>") == "2"
    assert final_answer("<think> <answer>3</answer> hm </think> 4 \n") == "4"


def test_exact_compares_whole_texts():
    assert [exact(sample(text, 42)) for text in (" 42\n", "42.", "so 42")] == [1.0, 0.0, 0.0]
    with pytest.raises(RewardRefused, match='no "answer"'):
        exact(sample("42"))


@pytest.mark.parametrize(
    ("answer", "response", "score"),
    [
        ("1/2", "It is $0.5$.", 1.0),
        (r"\frac{1}{2}", r"The answer is \boxed{0.5}", 1.0),
        ("42", "42", 1.0),
        ("42", "<think>42</think> 41", 0.0),
        ("x^2+1", "$1+x^2$", 1.0),
        ("x^2+1", "$x^2-1$", 0.0),
    ],
)
def test_math_verify(answer: str, response: str, score: float):
    assert math_verify(sample(response, answer)) == score


def test_reasoning_gym_scores_by_its_own_verifier():
    entry = {"question": "gcd of 8 and 12?", "answer": "4", "metadata": {"source_dataset": "gcd"}}
    assert [reasoning_gym(sample(text, "4", entry)) for text in (" 4\n", "<answer>4</answer>")] == [1.0, 1.0]
    assert reasoning_gym(sample("5", "4", entry)) < 1.0
    with pytest.raises(RewardRefused, match="'no_task' is no reasoning_gym task"):
        reasoning_gym(sample("4", "4", {**entry, "metadata": {"source_dataset": "no_task"}}))
    with pytest.raises(RewardRefused, match="metadata.source_dataset"):
        reasoning_gym(sample("4", "4"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:f", "cannot import no_such_module"),
        (f"{OWN}:missing", "has no function missing"),
        (f"{OWN}:NOT_A_FUNCTION", "has no function"),
    ],
)
def test_what_is_no_reward_is_named(name: str, message: str):
    with pytest.raises(UserError, match=f"rl.reward: {name}: .*{message}"):
        resolve(name)


def test_a_reward_is_a_finite_number():
    assert checked(lambda s: True, {}) == 1.0
    for value in (float("inf"), float("nan"), "1", None, [1]):
        with pytest.raises(RewardRefused):
            checked(lambda s, value=value: value, {})


def test_pool_keeps_order_and_survives_bad_samples(caplog: pytest.LogCaptureFixture):
    texts = ["a", "raise", "bb", "hang", "ccc", "exit", "nan", "dddd", "text", "none", "e" * 100_000]
    caplog.set_level("WARNING", logger="bailing_mtp")
    with RewardPool(f"{OWN}:by_response", n_workers=2, timeout_s=4.0, on_failure=-1.0) as pool:
        found = pool.score([sample(text) for text in texts])
        assert found.values == (1, -1, 2, -1, 3, -1, -1, 4, -1, -1, 100_000)
        assert found.failures == {"error": 4, "timeout": 1, "crash": 1}
        assert found.first_failure.startswith("sample 1: error: KeyError: 'no such thing'")
        assert "6 of 11 samples failed" in caplog.text
        again = pool.score([sample("after")] * 3)
        assert (again.values, again.failures, again.first_failure) == ((5, 5, 5), {}, None)
        assert pool.score([]).values == ()


def test_a_killed_reward_takes_its_children_along(tmp_path: Path):
    pid_file = tmp_path / "pid"
    with RewardPool(f"{OWN}:by_response", n_workers=1, timeout_s=3.0, on_failure=0.5) as pool:
        found = pool.score([sample("leave a child", None, {"pid_file": str(pid_file)}), sample("xy")])
    assert found.values == (0.5, 2.0) and found.failures == {"timeout": 1}
    assert not _lives(int(pid_file.read_text()))


def test_pool_environment_is_its_own_and_prints_do_no_harm(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with RewardPool(f"{OWN}:environment", 1, 20.0, 0.0) as pool:
        assert pool.score([sample("")]).values == (1.0,)
    with RewardPool(f"{OWN}:length", 1, 20.0, 0.0) as pool:
        assert pool.score([sample("abc"), sample("")]).values == (3.0, 0.0)


def test_a_reward_that_cannot_be_loaded_ends_the_start():
    with pytest.raises(UserError, match="rl.reward: no_such_module:f: cannot import"):
        RewardPool("no_such_module:f", 2, 1.0, 0.0)


def _lives(pid: int) -> bool:
    for _ in range(50):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        if "(zombie)" in Path(f"/proc/{pid}/status").read_text():
            return False
        time.sleep(0.1)
    return True
