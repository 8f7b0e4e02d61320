"""A pretraining rank that is killed in the middle of its second save: python -m tests.checkpoint.killed <overrides>

KILL_RANK says which rank dies; the others are ended by the launcher, as after any crash.
"""

import os
import signal
import sys
import time
from typing import Any

from bailing_mtp.config import PretrainConfig
from bailing_mtp.weights.sharded.chunks import ChunkWriter
from recipes.common import run
from recipes.pretrain import main

SAVES_BEFORE = 1


def kill_in_second_save() -> None:
    put = ChunkWriter.put

    def dies(self: ChunkWriter, *arguments: Any) -> None:
        put(self, *arguments)
        if self.is_second and len(self.chunks) == 20:
            self.flush()
            if os.environ["RANK"] == os.environ["KILL_RANK"]:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)

    counts = {"writers": 0}
    create = ChunkWriter.__init__

    def counted(self: ChunkWriter, *arguments: Any) -> None:
        create(self, *arguments)
        self.is_second = counts["writers"] == SAVES_BEFORE
        counts["writers"] += 1

    ChunkWriter.put, ChunkWriter.__init__ = dies, counted


if __name__ == "__main__":
    kill_in_second_save()
    sys.argv[0] = "killed"
    run(main, PretrainConfig, "pretrain")
