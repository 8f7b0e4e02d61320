"""Files of the score verb: read token documents, pack them, collect results over ranks, write one safetensors."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from bailing_mtp.contracts.batch import PackedLayout, TokenBatch
from bailing_mtp.errors import UserError
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.training.scoring import Scores


@dataclass(frozen=True)
class Documents:
    """The input: all tokens, and where documents begin and end."""

    input_ids_T: Tensor
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Pack:
    """Consecutive documents for one forward; `begin` is its first token in the input."""

    begin: int
    batch: TokenBatch


def read_input(path: Path, vocab_size: int) -> Documents:
    """Read and check input_ids [T] int64 and cu_seqlens [N+1] int64. Raises UserError naming file and tensor."""
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise UserError(f"input: {path} is not a safetensors file ({error})") from None
    for name in ("input_ids", "cu_seqlens"):
        if name not in tensors:
            raise UserError(f"input: {path} has no tensor {name}; it holds {', '.join(sorted(tensors)) or 'none'}")
        if tensors[name].dtype is not torch.int64 or tensors[name].dim() != 1:
            found = f"{tensors[name].dtype} {list(tensors[name].shape)}"
            raise UserError(f"input: {path}: {name} is {found}; allowed: a vector of int64")
    input_ids_T, cu_seqlens = tensors["input_ids"], tensors["cu_seqlens"]
    lengths = cu_seqlens.diff()
    if len(cu_seqlens) < 2 or cu_seqlens[0] != 0 or cu_seqlens[-1] != len(input_ids_T) or bool((lengths < 1).any()):
        raise UserError(
            f"input: {path}: cu_seqlens must rise from 0 to the {len(input_ids_T)} tokens of input_ids, "
            "one document of at least one token between two entries"
        )
    outside = (input_ids_T < 0) | (input_ids_T >= vocab_size)
    if bool(outside.any()):
        index = int(outside.nonzero()[0])
        raise UserError(
            f"input: {path}: input_ids[{index}] is {int(input_ids_T[index])}; allowed: 0 to {vocab_size - 1}"
        )
    return Documents(input_ids_T, tuple(lengths.tolist()))


def pack_documents(documents: Documents, pack_tokens: int) -> list[Pack]:
    """Consecutive documents up to `pack_tokens` tokens together; a longer one stands alone."""
    groups: list[list[int]] = [[]]
    for length in documents.lengths:
        if groups[-1] and sum(groups[-1]) + length > pack_tokens:
            groups.append([])
        groups[-1].append(length)
    packs, begin = [], 0
    for lengths in groups:
        end = begin + sum(lengths)
        ids = documents.input_ids_T[begin:end]
        packs.append(Pack(begin, TokenBatch(ids, torch.ones_like(ids, dtype=torch.bool), PackedLayout.build(lengths))))
        begin = end
    return packs


class Result:
    """What is written: zeros until a rank puts its packs, whole after `join`."""

    def __init__(self, documents: Documents, with_mtp: bool, vocab_size: int) -> None:
        n_tokens = len(documents.input_ids_T)
        streams = ("", "mtp_") if with_mtp else ("",)
        self.tensors = {f"{stream}logprobs": torch.zeros(n_tokens) for stream in streams}
        if vocab_size:
            self.tensors |= {f"{stream}logits": torch.zeros(n_tokens, vocab_size) for stream in streams}

    def put(self, pack: Pack, scores: Scores) -> None:
        rows = slice(pack.begin, pack.begin + pack.batch.layout.n_tokens)
        found = {
            "logprobs": scores.logprobs_T,
            "mtp_logprobs": scores.mtp_logprobs_T,
            "logits": scores.logits_TV,
            "mtp_logits": scores.mtp_logits_TV,
        }
        for name, target in self.tensors.items():
            target[rows] = found[name].cpu()

    def join(self, context: ParallelContext) -> None:
        """Bring the parts of all data-parallel ranks together (each site was put by one of them)."""
        if context.dp == 1:
            return
        for name, tensor in self.tensors.items():
            moved = tensor.to(context.device)
            dist.all_reduce(moved, group=context.dp_group)
            self.tensors[name] = moved.cpu()

    def summary(self) -> str:
        """Mean negative log-likelihoods in nats, for the closing line."""
        parts = [f"{len(self.tensors['logprobs']):,} tokens"]
        for name in ("logprobs", "mtp_logprobs"):
            if name in self.tensors and not self.tensors[name].isnan().all():
                ahead = "t+1" if name == "logprobs" else "t+2"
                parts.append(f"NLL {ahead} {-self.tensors[name].nanmean():.4f}")
        return ", ".join(parts)


def write_output(path: Path, result: Result) -> None:
    """Write under a temporary name and rename, so that a killed run leaves no half file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    save_file(result.tensors, partial)
    partial.rename(path)
