"""What sums over peer memory need of a GPU's memory; they themselves are in peers.py, which imports Triton."""

import torch

from bailing_mtp.config import RolloutConfig
from bailing_mtp.kernels.reference.peer_norm import Mailboxes
from bailing_mtp.rollout.lockstep import bucket


def peer_rows(config: RolloutConfig, tp: int, max_running: int) -> int:
    """Rows of the largest sum of a decode step over peer memory; 0 where it is not used."""
    if config.tp_sum != "peer" or tp == 1:
        return 0
    return bucket(max_running) * (config.speculative_tokens + 1)


def peer_bytes(config: RolloutConfig, tp: int, max_running: int, hidden_size: int, dtype: torch.dtype) -> int:
    """Of one rank: mailboxes, and the room of longer sums."""
    rows = peer_rows(config, tp, max_running)
    mail_rows = Mailboxes.rows(tp, rows)
    return 8 * Mailboxes.words(tp, mail_rows, hidden_size, dtype.itemsize) + rows * hidden_size * dtype.itemsize
