"""From modules and optimizer shards to stored blocks, and back. The optimizer comes as plain flat tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.weights.local_tensors import local_tensors
from bailing_mtp.weights.names import ParamMap, Shard, mtp_map, trunk_map
from bailing_mtp.weights.sharded.reader import ShardedCheckpoint
from bailing_mtp.weights.sharded.save import Stored
from bailing_mtp.weights.sharded.sections import Block, Replicas, Section, rectangles, sections
from bailing_mtp.weights.stored import CheckpointError


class FlatShard(Protocol):
    """A rank's part of one parameter's optimizer state; training/optimizer_state.py makes them."""

    @property
    def parameter(self) -> nn.Parameter: ...

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...

    @property
    def states(self) -> Mapping[str, Tensor]: ...


class ModuleTable:
    """Every tensor of the modules that a checkpoint stores, with its sections."""

    def __init__(self, arch: Architecture, shard: Shard, trunk: nn.Module, mtp: nn.Module | None) -> None:
        self._shard = shard
        self._entries: list[tuple[str, ParamMap, Tensor]] = []
        self._by_parameter: dict[nn.Parameter, tuple[str, ParamMap]] = {}
        modules = [(trunk, trunk_map(arch, shard))] + ([] if mtp is None else [(mtp, mtp_map(arch, shard))])
        for module, maps in modules:
            tensors = local_tensors(module, maps)
            self._entries += [(name, param, tensors[name]) for name, param in maps.items()]
            self._by_parameter |= {p: (name, maps[name]) for name, p in module.named_parameters()}

    def weights(self, replicas: Replicas) -> Iterator[Stored]:
        """The blocks of the model that this rank stores."""
        n_sections = 0
        for name, param, tensor in self._entries:
            for section in sections(name, param, self._shard):
                if replicas.writes(param.split, n_sections):
                    yield _stored(section.key, section, section.block, _flat_view(tensor, section))
                n_sections += 1

    def optimizer(self, shards: Iterable[FlatShard]) -> Iterator[Stored]:
        """The blocks of the optimizer's state that this rank stores: all that it owns, unless a lower tensor-
        parallel rank owns the same."""
        for shard in shards:
            if self._map(shard)[1].split == "none" and self._shard.tp_rank > 0:
                continue
            for key, section, block, view in self._views(shard):
                yield _stored(key, section, block, view)

    @torch.no_grad()
    def fill_optimizer(self, shards: Iterable[FlatShard], checkpoint: ShardedCheckpoint) -> None:
        """Copy every shard's states from a checkpoint of any layout. Raises CheckpointError if one is absent."""
        wanted = [views for shard in shards for views in self._views(shard)]
        missing = sorted({key for key, *_ in wanted if key not in checkpoint.index})
        if missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise CheckpointError(f"{checkpoint.directory}: holds no optimizer state {', '.join(missing[:5])}{more}")
        for key, _, block, view in wanted:
            view.copy_(checkpoint.read(key, block).view(-1))

    def _views(self, shard: FlatShard) -> Iterator[tuple[str, Section, Block, Tensor]]:
        """(stored name, section, block, flat view) of everything that a shard holds."""
        name, param = self._map(shard)
        for section in sections(name, param, self._shard):
            for first, stop, block in rectangles(section, shard.start, shard.stop):
                for state, flat in shard.states.items():
                    yield (
                        f"optimizer.{state}.{section.key}",
                        section,
                        block,
                        flat[first - shard.start : stop - shard.start],
                    )

    def _map(self, shard: FlatShard) -> tuple[str, ParamMap]:
        return self._by_parameter[shard.parameter]


def _flat_view(tensor: Tensor, section: Section) -> Tensor:
    return tensor.reshape(-1)[section.begin : section.end]


def _stored(key: str, section: Section, block: Block, flat: Tensor) -> Stored:
    if len(section.shape) == 1:
        return Stored(key, section.shape, (block.row,), flat)
    return Stored(key, section.shape, (block.row, block.col), flat.view(block.rows, block.cols))
