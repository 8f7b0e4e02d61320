"""Reads a .wandb file of an offline run: a LevelDB log of protobuf records."""

import json
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

MAGIC = b":W&B"
FILE_HEADER_BYTES = 7
BLOCK_BYTES = 32768
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass
class OfflineRun:
    """What one process of a run logged."""

    run_id: str = ""
    project: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    is_complete: bool = False
    step_axes: dict[str, str] = field(default_factory=dict)
    """Metric name or glob -> the metric that it is drawn over."""


def read_offline_run(path: Path, patience_s: float = 20.0) -> OfflineRun:
    """The run in `path`, once it is complete: its process writes the end after `finish` has returned."""
    deadline_s = time.monotonic() + patience_s
    while not (run := _read(path)).is_complete and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return run


def _read(path: Path) -> OfflineRun:
    run = OfflineRun()
    for payload in _payloads(path.read_bytes()):
        record = Record.FromString(payload)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.run_id, run.project = record.run.run_id, record.run.project
            run.config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "history":
            items = record.history.item
            run.history.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
        elif kind == "exit":
            run.is_complete = True
        elif kind == "metric":
            run.step_axes[record.metric.glob_name or record.metric.name] = record.metric.step_metric
    return run


def _payloads(data: bytes) -> Iterator[bytes]:
    assert data.startswith(MAGIC) or not data
    position, parts = FILE_HEADER_BYTES, b""
    while position + 7 <= len(data):
        left = BLOCK_BYTES - position % BLOCK_BYTES
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        if kind == 0:
            return
        piece = data[position + 7 : position + 7 + length]
        position += 7 + length
        parts = piece if kind in (FULL, FIRST) else parts + piece
        if kind in (FULL, LAST):
            yield parts
