"""Export from several ranks, called by the multi-process suite on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from bailing_mtp.weights.checkpoint_files import CheckpointError
from bailing_mtp.weights.export import export_hf
from bailing_mtp.weights.load import load_hf, read_architecture
from bailing_mtp.weights.names import Shard
from tests.weights.stand_in import FIXTURES, assert_same_bytes, build, stored


def check_export(
    tp_group: dist.ProcessGroup, ep_group: dist.ProcessGroup, shard: Shard, directory: Path, kind: str = "moe"
) -> None:
    """Sharded load and export give back the fixture's bytes, with the MTP layer built and passed through.

    `directory`: shared by all ranks, new for this call. The groups are this rank's, ordered by tp_rank and
    ep_rank.
    """
    source = FIXTURES / kind
    arch = read_architecture(source)
    trunk, mtp = build(arch, shard)
    load_hf(source, arch, shard, trunk, mtp)
    is_writer = dist.get_rank() == 0
    for name, module in (("built", mtp), ("passed", None)):
        target = directory / name
        report = export_hf(
            target, arch, shard, trunk, module, tp_group=tp_group, ep_group=ep_group, is_writer=is_writer,
            source=source, max_shard_bytes=1_000_000,
        )  # fmt: skip
        dist.barrier()
        assert (report is not None) == is_writer
        if is_writer:
            assert_same_bytes(stored(target), stored(source))
    _check_refusal(tp_group, ep_group, shard, directory)


def _check_refusal(
    tp_group: dist.ProcessGroup, ep_group: dist.ProcessGroup, shard: Shard, directory: Path
) -> None:
    """A target that only the writer finds occupied is refused on every rank that takes part; none waits."""
    arch = read_architecture(FIXTURES / "moe")
    trunk, mtp = build(arch, shard)
    is_writer = dist.get_rank() == 0
    groups = (tp_group, ep_group)
    takes_part = any(0 in dist.get_process_group_ranks(group) for group in groups)
    target = directory / ("built" if is_writer else "absent")

    def export() -> None:
        export_hf(
            target,
            arch,
            shard,
            trunk,
            mtp,
            tp_group=tp_group,
            ep_group=ep_group,
            is_writer=is_writer,
            source=None,
        )

    if takes_part:
        with pytest.raises(
            CheckpointError, match="empty directory" if is_writer else "global rank 0 refused"
        ):
            export()
    else:
        export()
    dist.barrier()
