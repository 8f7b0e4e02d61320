"""The table of stored blocks: complete, without overlap, in every layout; flat ranges become exact rectangles."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.weights.local_tensors import local_tensors
from bailing_mtp.weights.names import ParamMaps, Shard, mtp_map, trunk_map
from bailing_mtp.weights.sharded.sections import Block, Section, hf_blocks, rectangles, sections, stored_shapes
from tests.weights.stand_in import build, tiny_config

ARCH = Architecture.from_hf(tiny_config(), "test")
LAYOUTS = [(1, 1), (2, 1), (1, 4), (2, 2), (4, 8)]


def maps(shard: Shard) -> ParamMaps:
    return trunk_map(ARCH, shard) | {f"mtp.{name}": param for name, param in mtp_map(ARCH, shard).items()}


def ranks(tp: int, ep: int) -> Iterator[Shard]:
    """One shard for every part of the model; parts that a split does not touch come up again."""
    for tp_rank in range(tp):
        for ep_rank in range(ep):
            yield Shard(tp, tp_rank, ep, ep_rank)


@pytest.mark.parametrize(("tp", "ep"), LAYOUTS)
def test_shards_cover_every_stored_element_equally_often(tp: int, ep: int) -> None:
    shapes = stored_shapes(maps(Shard()))
    counts = {key: torch.zeros(shape if len(shape) > 1 else (*shape, 1)) for key, shape in shapes.items()}
    for shard in ranks(tp, ep):
        for name, param in maps(shard).items():
            for section in sections(name, param, shard):
                assert section.shape == shapes[section.key]
                row, rows, col, cols = section.block
                counts[section.key][row : row + rows, col : col + cols] += 1
    for key, count in counts.items():
        assert count.min() == count.max() > 0, key


@pytest.mark.parametrize(("tp", "ep"), [(2, 2), (4, 8)])
def test_sections_hold_what_the_hf_names_say(tp: int, ep: int) -> None:
    """A stored element's value names its place; a shard filled from stored blocks equals one cut by HF pieces."""
    whole = {
        key: torch.arange(1000 * index, 1000 * index + torch.Size(shape).numel()).view(shape[0], -1)
        for index, (key, shape) in enumerate(stored_shapes(maps(Shard())).items())
    }
    blocks = hf_blocks(maps(Shard()))
    for shard in ranks(tp, ep):
        for name, param in maps(shard).items():
            by_piece = torch.full(param.shape, -1)
            for piece in param.pieces:
                key, block = blocks[piece.hf_name]
                hf = _cut(whole[key], block).reshape(piece.hf_shape)
                dim, start, stop = piece.held
                view = by_piece
                for land_dim, first, last in piece.lands:
                    view = view.narrow(land_dim, first, last - first)
                view.copy_(hf.narrow(dim, start, stop - start).reshape(view.shape))
            by_section = torch.full((by_piece.numel(),), -1)
            for section in sections(name, param, shard):
                by_section[section.begin : section.end] = _cut(whole[section.key], section.block).reshape(-1)
            assert torch.equal(by_section, by_piece.view(-1)), name


def test_stand_ins_have_the_shapes_of_the_table() -> None:
    trunk, _ = build(ARCH, Shard(2, 1, 2, 0))
    tensors = local_tensors(trunk, trunk_map(ARCH, Shard(2, 1, 2, 0)))
    for name, param in trunk_map(ARCH, Shard(2, 1, 2, 0)).items():
        ends = [section.end for section in sections(name, param, Shard(2, 1, 2, 0))]
        assert max(ends) == tensors[name].numel()


@pytest.mark.parametrize("cols", [1, 3, 8])
def test_rectangles_are_the_flat_range(cols: int) -> None:
    section = Section("w", (20, 10), begin=5, block=Block(row=4, rows=6, col=2, cols=cols))
    whole = torch.zeros(20, 12, dtype=torch.long)
    _cut(whole, section.block).copy_(torch.arange(5, 5 + 6 * cols).view(6, cols))
    for start in range(0, section.end + 3):
        for stop in range(start, section.end + 4):
            found: list[Tensor] = []
            pieces = list(rectangles(section, start, stop))
            for first, last, block in pieces:
                assert (last - first) == block.rows * block.cols
                found.append(_cut(whole, block).reshape(-1))
            inside = range(max(start, section.begin), min(stop, section.end))
            expected = torch.tensor(list(inside), dtype=torch.long)
            assert torch.equal(torch.cat([*found, torch.empty(0, dtype=torch.long)]), expected)
            assert len(pieces) <= 3


def _cut(whole: Tensor, block: Block) -> Tensor:
    return whole[block.row : block.row + block.rows, block.col : block.col + block.cols]
