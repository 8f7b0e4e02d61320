"""What the demo measured, as one table: launch/demo_summary.py <directory> <seconds>"""

import json
import sys
from pathlib import Path
from typing import Any

Row = tuple[str, str, str]


def main(directory: Path, seconds: int) -> None:
    rows = [json.loads(line) for line in (directory / "grpo" / "metrics.jsonl").read_text().splitlines()]
    evaluated = [row for row in rows if row.get("valid/reward_mean") is not None]
    stats = [
        json.loads((directory / f"generate_k{k}" / "samples.jsonl.stats.json").read_text(encoding="utf-8"))
        for k in (0, 2)
    ]
    n_prompts = len((directory / "grpo" / "data" / "held_out.jsonl").read_text(encoding="utf-8").splitlines())
    minutes, rest = divmod(seconds, 60)
    print(f"\n== demo: {minutes}m{rest:02d}s, everything in {directory}\n")
    print_table(before_and_after(evaluated[0], evaluated[-1], n_prompts))
    print_table(with_and_without(*stats))
    speedup = stats[0]["seconds"] / stats[1]["seconds"]
    steps = stats[0]["steps"] / stats[1]["steps"]
    print(f"  Time without speculation / with it: {speedup:.2f}; decode steps: {steps:.2f}.")
    print("  On a CPU the work of a step grows with the tokens that it verifies.\n")
    print(f"charts: {directory}/pretrain/charts/overview.png {directory}/grpo/charts/{{rl,accept_length}}.png")
    for verb in ("pretrain", "grpo"):
        print(f"wandb: wandb sync {directory}/{verb}/wandb/offline-run-*")


def before_and_after(first: dict[str, Any], last: dict[str, Any], n_prompts: int) -> list[Row]:
    def reward(row: dict[str, Any]) -> str:
        return f"{row['valid/reward_mean']:.3f} +- {row['valid/reward_standard_error']:.3f}"

    def number(row: dict[str, Any], name: str) -> str:
        return f"{row[f'valid/{name}']:.3f}"

    return [
        (f"{n_prompts} held-out prompts, sampled", "before grpo", f"after {last['step']} steps"),
        ("reward, mean +- standard error", reward(first), reward(last)),
        ("solved", number(first, "reward_solved"), number(last, "reward_solved")),
        ("accept length, k=2 (plain = 1)", number(first, "accept_length"), number(last, "accept_length")),
    ]


def with_and_without(plain: dict[str, Any], drafted: dict[str, Any]) -> list[Row]:
    def both(label: str, key: str, form: str) -> Row:
        return label, format(plain[key], form), format(drafted[key], form)

    return [
        (f"{plain['samples']:,} rollouts of the trained policy", "plain", "k=2"),
        both("seconds", "seconds", ".2f"),
        both("tokens per second", "tokens_per_second", ",.0f"),
        both("decode steps", "steps", ",d"),
        both("accept length", "accept_length", ".3f"),
    ]


def print_table(rows: list[Row]) -> None:
    for label, *values in rows:
        print(f"  {label:<38}" + "".join(f"{value:>18}" for value in values))
    print()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
