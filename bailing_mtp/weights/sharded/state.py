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


class RankState(Protocol):
    """Consecutive elements of a state of one parameter that only the layout which wrote it can read back;
    training/adamw8bit.py makes them."""

    @property
    def parameter(self) -> nn.Parameter: ...

    @property
    def name(self) -> str: ...

    @property
    def start(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def values(self) -> Tensor: ...


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
        self._mtp_parameters = set() if mtp is None else set(mtp.parameters())

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
        _require(checkpoint, {key for key, *_ in wanted})
        for key, _, block, view in wanted:
            view.copy_(checkpoint.read(key, block).view(-1))

    def rank_states(self, states: Iterable[RankState], rank: int, world_size: int) -> Iterator[Stored]:
        """The blocks of 8-bit states: each is stored with a row for every rank."""
        for state in states:
            shape, values = (world_size, state.size), state.values.view(1, -1)
            yield Stored(self._rank_key(state), shape, (rank, state.start), values)

    @torch.no_grad()
    def fill_rank_states(
        self, states: Iterable[RankState], rank: int, world_size: int, checkpoint: ShardedCheckpoint
    ) -> None:
        """Copy this rank's rows from a checkpoint. Raises CheckpointError if it lacks one, or has another layout."""
        wanted = [(self._rank_key(state), state) for state in states]
        _require(checkpoint, {key for key, _ in wanted})
        for key, state in wanted:
            if checkpoint.index[key][0].shape != (world_size, state.size):
                raise CheckpointError(
                    f"{checkpoint.directory}: its 8-bit optimizer states continue only in the layout that wrote them "
                    f"({_layout(checkpoint)}); use that one, or checkpoint.load it in a new run, from the weights alone"
                )
            row = checkpoint.read(key, Block(rank, 1, state.start, state.values.numel()))
            state.values.copy_(row.view(-1))

    def _rank_key(self, state: RankState) -> str:
        prefix = "mtp." if state.parameter in self._mtp_parameters else ""
        return f"optimizer.adamw8bit.{state.name}.{prefix}{self._by_parameter[state.parameter][0]}"

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


def _require(checkpoint: ShardedCheckpoint, keys: set[str]) -> None:
    missing = sorted(keys - checkpoint.index.keys())
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise CheckpointError(f"{checkpoint.directory}: holds no optimizer state {', '.join(missing[:5])}{more}")


def _layout(checkpoint: ShardedCheckpoint) -> str:
    layout = checkpoint.state["layout"]
    return f"parallel.tp={layout['tp']} parallel.ep={layout['ep']} on {layout['world_size']} ranks"


def _flat_view(tensor: Tensor, section: Section) -> Tensor:
    return tensor.reshape(-1)[section.begin : section.end]


def _stored(key: str, section: Section, block: Block, flat: Tensor) -> Stored:
    if len(section.shape) == 1:
        return Stored(key, section.shape, (block.row,), flat)
    return Stored(key, section.shape, (block.row, block.col), flat.view(block.rows, block.cols))
