"""Who this process is among those of one launch, before any process group exists."""

import os
import socket
from dataclasses import dataclass


@dataclass(frozen=True)
class Ranks:
    """This process's place in the launch, as torchrun tells it."""

    rank: int
    world_size: int
    host: str
    local_world_size: int = 1
    """Processes of this launch on this host."""

    @classmethod
    def from_environment(cls) -> "Ranks":
        """Read RANK, WORLD_SIZE and LOCAL_WORLD_SIZE; a process started alone is rank 0 of 1."""
        return cls(
            rank=int(os.environ.get("RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            host=socket.gethostname(),
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        )

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host})"
