"""The files of the generate verb: samples as they end, all of them in order at the end, and the numbers."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from bailing_mtp.contracts.samples import RolloutGroup, Sample
from bailing_mtp.data.tokenizer import Tokenizer
from bailing_mtp.parallel.context import ParallelContext

DEFINITIONS = {
    "logprobs": "log-softmax of the logits at each response token: no temperature, no truncation",
    "processed_logprobs": "log-probability under the distribution that was sampled (masks, temperature, top-k, top-p)",
    "kept_logmass": "log of the mass of softmax(logits / temperature) that masks, top-k and top-p left; "
    "null at temperature 0",
    "accept_length": "response tokens kept per row and decode step, the fresh token included",
    "accept_depth": "share of drafts accepted at each depth, given that all before were",
}


class SampleFiles:
    """<output>.partial grows while samples end and stays if the run is killed; `finish` replaces <output>.

    The first rank of every replica writes its own part: <output>.partial, then <output>.partial.1, ...
    """

    def __init__(self, output: Path, tokenizer: Tokenizer | None, context: ParallelContext) -> None:
        self._output, self._tokenizer, self._context = output, tokenizer, context
        suffix = f".{context.dp_rank}" if context.dp_rank else ""
        self._partial = output.with_name(f"{output.name}.partial{suffix}")
        self._file: TextIO | None = None

    def add(self, sample: Sample) -> None:
        """Append one sample, at once and whole."""
        if self._context.tp_rank:
            return
        if self._file is None:
            self._output.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._partial.open("w", encoding="utf-8")
        self._file.write(self._line(sample))
        self._file.flush()

    def finish(self, groups: Sequence[RolloutGroup], stats: dict[str, Any]) -> None:
        """Write all samples in order, and the numbers; then drop the partial files. Collective."""
        if self._context.is_writer:
            whole = self._output.with_name(self._output.name + ".whole")
            with whole.open("w", encoding="utf-8") as file:
                file.writelines(self._line(sample) for group in groups for sample in group.samples)
            numbers = self._output.with_name(self._output.name + ".stats.json")
            numbers.write_text(json.dumps(stats | {"definitions": DEFINITIONS}, indent=2) + "\n", encoding="utf-8")
            os.replace(whole, self._output)
        self._context.barrier()
        if self._file is not None:
            self._file.close()
            self._partial.unlink()

    def _line(self, sample: Sample) -> str:
        text = None if self._tokenizer is None else self._tokenizer.decode(sample.response_ids)
        values = {
            "prompt_index": sample.prompt_index,
            "sample_index": sample.sample_index,
            "prompt_ids": sample.prompt_ids,
            "response_ids": sample.response_ids,
            "text": text,
            "logprobs": sample.logprobs,
            "processed_logprobs": sample.processed_logprobs,
            "kept_logmass": sample.kept_logmass,
            "finish_reason": sample.finish_reason,
        }
        if sample.error is not None:
            values["error"] = sample.error
        return json.dumps(values, ensure_ascii=False) + "\n"
