"""What launch/measure.sh measured, as one table: launch/measure_summary.py <directory> <checkpoint>"""

import json
import sys
from pathlib import Path
from typing import Any

from demo_summary import Row, print_table


def main(directory: Path, checkpoint: str) -> None:
    plain, drafted = (_read(directory / f"k{k}" / "samples.jsonl.stats.json") for k in (0, 2))
    predicted = _read(directory / "score" / "acceptance.json")
    print(f"\n== measured: {checkpoint}, everything in {directory}\n")
    print_table(with_and_without(plain, drafted))
    print_table(acceptance(drafted, predicted))
    speedup = drafted["tokens_per_second"] / plain["tokens_per_second"]
    print(f"  Tokens per second with k=2 over plain: {speedup:.2f}.\n")


def with_and_without(plain: dict[str, Any], drafted: dict[str, Any]) -> list[Row]:
    def both(label: str, key: str, form: str) -> Row:
        return label, format(plain[key] or 0, form), format(drafted[key] or 0, form)

    return [
        (f"{plain['samples']:,} samples a run", "plain", "k=2"),
        both("tokens per second", "tokens_per_second", ",.0f"),
        both("accept length", "accept_length", ".3f"),
        both("tokens", "tokens", ",d"),
        both("decode steps", "steps", ",d"),
        both("rows of a step / its room", "occupancy", ".2f"),
        both("seconds, prefill and start included", "seconds", ".2f"),
    ]


def acceptance(drafted: dict[str, Any], predicted: dict[str, Any]) -> list[Row]:
    """Measured beside what score predicts from a forward pass over the samples of the k=2 run."""
    depths = enumerate(drafted["accept_depth"], start=1)
    return [
        ("k=2", "measured", "predicted"),
        *(
            (f"drafts kept at depth {depth}", _share(kept), _share(predicted[f"alpha_{depth}_k2"]["value"]))
            for depth, kept in depths
        ),
        ("accept length", _share(drafted["accept_length"]), _share(predicted["accept_length_k2"]["value"])),
    ]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
