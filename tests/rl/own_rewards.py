"""Rewards as a user would write them, well and badly."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

NOT_A_FUNCTION = 3


def length(sample: dict[str, Any]) -> float:
    print("a reward may print", flush=True)
    return float(len(sample["response"]))


def by_response(sample: dict[str, Any]) -> Any:
    """Does what the response says."""
    what = sample["response"]
    if what == "hang":
        time.sleep(600)
    if what == "exit":
        os._exit(7)
    if what == "raise":
        raise KeyError("no such thing")
    if what == "leave a child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(sample["record"]["pid_file"], "w") as file:
            file.write(str(child.pid))
        time.sleep(600)
    return {"nan": float("nan"), "text": "1.0", "none": None}.get(what, len(what))


def environment(sample: dict[str, Any]) -> float:
    """1 when nothing of the launch is here and no GPU can be seen."""
    foreign = [name for name in os.environ if name in ("RANK", "WORLD_SIZE", "SECRET_TOKEN", "MASTER_ADDR")]
    return float(not foreign and os.environ["CUDA_VISIBLE_DEVICES"] == "")
