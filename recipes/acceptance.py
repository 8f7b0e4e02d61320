"""The acceptance report of the score verb: what speculation would accept, on the policy's own samples."""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bailing_mtp.config import ScoreConfig
from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.data.sources import BadLines, jsonl_records
from bailing_mtp.errors import UserError
from bailing_mtp.log import ProgressLine
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.training.acceptance import Estimates, document_estimates, draft_chain, merged

from .scores import Documents, Pack, pack_documents, read_input
from .session import find_source, join_ranks, leave_ranks, make_model

DEPTHS = 3
PACK_TOKENS = 4096
"""Tokens of one forward; a longer document is a pack of its own."""


@dataclass(frozen=True)
class SampleDocuments:
    """Documents, and the site of each (counted inside it) at which the first decode step starts."""

    documents: Documents
    first_sites: tuple[int, ...]


def report_acceptance(config: ScoreConfig) -> None:
    """Print and write <run_dir>/acceptance.json."""
    source = find_source(config)
    if not source.holds_mtp:
        raise UserError(f"report: 'acceptance' needs an MTP layer and {config.checkpoint.load or 'the model'} has none")
    samples = read_samples(Path(config.input), source.arch)
    context = join_ranks(config, source.arch)
    built = make_model(config, source, context, with_mtp=True)
    for module in built.modules:
        module.eval()
    packs = pack_documents(samples.documents, PACK_TOKENS)
    first_sites, found = list(samples.first_sites), []
    line = ProgressLine(sys.stderr if context.is_writer else None)
    for first in range(0, len(packs), context.dp):
        mine = min(first + context.dp_rank, len(packs) - 1)
        heads = draft_chain(built, packs[mine].batch, context, config.temperature, DEPTHS)
        if first + context.dp_rank < len(packs):
            found += [document_estimates(heads, *place) for place in _places(packs, mine, first_sites)]
        done = min(first + context.dp, len(packs))
        line.show(f"read {done}/{len(packs)} packs", final=done == len(packs))
    estimates = joined(merged(found), context)
    if context.is_writer:
        _publish(config, estimates, source.arch.vocab_size, len(first_sites))
    context.barrier()
    leave_ranks()


def read_samples(path: Path, arch: Architecture) -> SampleDocuments:
    """The output of `generate` (.jsonl: responses only are judged), or documents as `score` reads them (whole)."""
    if path.suffix != ".jsonl":
        documents = read_input(path, arch.vocab_size)
        return SampleDocuments(documents, (0,) * len(documents.lengths))
    ids, lengths, first_sites = [], [], []
    for record, origin in jsonl_records(path, BadLines("fail", can_skip=False)):
        prompt, response = (_ids(record, key, origin, arch.vocab_size) for key in ("prompt_ids", "response_ids"))
        if prompt and response:
            ids += [*prompt, *response]
            lengths.append(len(prompt) + len(response))
            first_sites.append(len(prompt) - 1)
    if not lengths:
        raise UserError(f"input: {path} holds no sample; allowed: the output of generate, with at least one token")
    return SampleDocuments(Documents(torch.tensor(ids), tuple(lengths)), tuple(first_sites))


def _ids(record: Any, key: str, origin: str, vocab_size: int) -> list[int]:
    ids = record.get(key) if isinstance(record, dict) else None
    if not isinstance(ids, list) or any(type(i) is not int or not 0 <= i < vocab_size for i in ids):
        raise UserError(f"input: {origin}: {key} must be a list of token ids, 0 to {vocab_size - 1}")
    return ids


def _places(packs: list[Pack], index: int, first_sites: list[int]) -> list[tuple[int, int, int]]:
    """(begin, end, first site) of each document of a pack, counted in the pack."""
    earlier = sum(len(pack.batch.layout.lengths) for pack in packs[:index])
    places, begin = [], 0
    for number, length in enumerate(packs[index].batch.layout.lengths):
        places.append((begin, begin + length, begin + first_sites[earlier + number]))
        begin += length
    return places


def joined(mine: Estimates, context: ParallelContext) -> Estimates:
    """Estimates over the documents of all data-parallel ranks, on each of them."""
    if context.dp == 1:
        return mine
    everyone: list[Any] = [None] * context.dp
    dist.all_gather_object(everyone, mine, group=context.dp_group)
    return merged(everyone)


def _publish(config: ScoreConfig, estimates: Estimates, vocab_size: int, n_documents: int) -> None:
    names = {"nll_1": "NLL t+1", "nll_2": "NLL t+2", "top1": "MTP argmax = trunk argmax", "alpha_1": "alpha_1"}
    for k in range(1, DEPTHS + 1):
        names[f"accept_length_k{k}"] = f"accept length, k={k}"
        for depth in range(1, k + 1):
            given = f" given {depth - 1} accepted" if depth > 1 else ""
            names[f"alpha_{depth}_k{k}"] = f"  alpha_{depth}{given}"
    print(f"acceptance at temperature {config.temperature:g}, {n_documents} documents, ln V {math.log(vocab_size):.4f}")
    for name, label in names.items():
        ratio = estimates[name]
        print(f"  {label:<28} {ratio.value:.4f} +- {ratio.standard_error:.4f}  (n={ratio.sites:,})")
    values = {
        name: {"value": _number(r.value), "standard_error": _number(r.standard_error), "n": r.sites}
        for name, r in estimates.items()
    }
    file = Path(config.run_dir) / "acceptance.json"
    header = {"temperature": config.temperature, "ln_vocabulary": math.log(vocab_size), "documents": n_documents}
    file.write_text(json.dumps(header | values, indent=2) + "\n", encoding="utf-8")
    print(f"score: written to {file}")


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
