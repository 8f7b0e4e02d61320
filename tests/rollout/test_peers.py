"""Sums over peer memory, as far as they go without a GPU; the launches are in tests/gpu/cases_two.py."""

from unittest import mock

import pytest
import torch

from bailing_mtp.config import ConfigError, GenerateConfig, RolloutConfig, UserError, build_config
from bailing_mtp.kernels.reference.norm import add_rms_norm
from bailing_mtp.kernels.reference.peer_norm import MOST_ROWS, Mailboxes, add_rms_norm_of_parts
from bailing_mtp.rollout import peers
from bailing_mtp.rollout.peer_room import peer_bytes, peer_rows
from tests.benchmark.sizes import config_of

PEER = RolloutConfig(tp_sum="peer", kernels="triton", speculative_tokens=2)
CPU = torch.device("cpu")


class Group:
    """Of four ranks, of which this is the third."""

    def size(self) -> int:
        return 4

    def rank(self) -> int:
        return 2


def test_parts_are_added_before_they_are_rounded():
    one, tiny = 1.0, 2.0**-9
    x, parts = torch.zeros(2, 3, dtype=torch.bfloat16), torch.tensor([one, tiny, tiny, -one]).bfloat16()
    parts_WRH = parts.view(4, 1, 1).expand(4, 2, 3)
    sum_RH, normed_RH = add_rms_norm_of_parts(x, parts_WRH, torch.ones(3), 1e-6)
    assert (sum_RH == 2 * tiny).all() and sum_RH.dtype == torch.bfloat16
    assert torch.equal(normed_RH, add_rms_norm(x, sum_RH, torch.ones(3), 1e-6)[1])


def test_the_room_that_is_planned_is_the_room_that_is_made():
    rows, made = peer_rows(PEER, 4, 100), []

    def room(group: Group, n: int, device: torch.device) -> tuple[torch.Tensor, tuple[int, ...]]:
        made.append(8 * n)
        return torch.zeros(n, dtype=torch.int64), (8, 16, 24, 32)

    def library(group: Group, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        made.append(elements * dtype.itemsize)

    with mock.patch.object(peers, "peer_words", room), mock.patch.object(peers, "PeerSum", library):
        sums = peers.PeerSums.make(Group(), rows, 64, torch.bfloat16, CPU)
    assert rows == 128 * 3 and sums.mail.rank == 2 and sums.mail.addresses_W.tolist() == [8, 16, 24, 32]
    assert sums.mail.number_R.tolist() == [0] * (MOST_ROWS // 3) and Mailboxes.rows(4, 5) == 5
    # Two exchanges of four senders' rows, 128 bytes in words of four beside a number of four.
    assert made == [2 * 4 * 256 * 256, 384 * 128] and sum(made) == peer_bytes(PEER, 4, 100, 64, torch.bfloat16)
    assert peer_rows(PEER, 1, 100) == 0 == peer_bytes(PEER, 1, 100, 64, torch.bfloat16)
    assert peer_rows(RolloutConfig(), 4, 100) == 0


def test_gpus_that_cannot_reach_one_another_are_named():
    def refuse(*_: object) -> None:
        raise RuntimeError("no peer access\ndetails")

    with (
        mock.patch.object(peers, "peer_words", refuse),
        pytest.raises(
            UserError, match=r"^rollout.tp_sum: 'peer' needs GPUs .*\(no peer access\); allowed here: library$"
        ),
    ):
        peers.PeerSums.make(Group(), 8, 64, torch.bfloat16, CPU)


@pytest.mark.parametrize(
    ("tp", "kernels", "message"),
    [
        (2, "torch", "rollout.tp_sum: 'peer' needs rollout.kernels=triton, and it is torch"),
        (1, "triton", "rollout.tp_sum: 'peer' sums over parallel.tp ranks, and that is 1; allowed here: library"),
    ],
)
def test_sums_over_peers_need_peers_and_triton(tp: int, kernels: str, message: str):
    values = {"run_dir": "r", "checkpoint": {"load": "c"}, "prompts": "p", "output": "o", "parallel": {"tp": tp}}
    with pytest.raises(ConfigError, match=message):
        build_config(GenerateConfig, values | {"rollout": {"tp_sum": "peer", "kernels": kernels}})
    build_config(GenerateConfig, values | {"rollout": {"tp_sum": "library", "kernels": kernels}})


@pytest.mark.parametrize(("what", "tp"), [("decode", 1), ("train", 2)])
def test_the_benchmark_sums_over_peers_where_it_decodes(what: str, tp: int):
    with pytest.raises(ConfigError, match="tp_sum: 'peer' is for what=decode at parallel.tp > 1"):
        config_of("model=tiny", f"what={what}", "tp_sum=peer", f"parallel.tp={tp}")
