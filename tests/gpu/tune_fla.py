"""Tunes fla's kernels of training's short convolution on this GPU, and keeps what it found:
python -m tests.gpu.tune_fla <folder> [--channels <n>,...] [--only <kernel>,...]

`<folder>/<kernel>.json` is what fla reads from FLA_CONFIG_DIR (fla.ops.utils.cache); entries that are there stay but
for those that were tuned again. bailing_mtp/kernels/fla_h200 is such a folder. bf16, packs of 8,192 tokens.

T tokens, C channels of queries, keys and values together, W taps, X those of a wider projection.
"""

import argparse
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton

from bailing_mtp.contracts.architecture import Architecture
from tests.model.test_presets import preset

# fla takes its cache mode from the environment when it is imported, which takes seconds.
if TYPE_CHECKING:
    from fla.ops.utils.cache import CachedAutotuner

LENGTHS = (5000, 1, 2100, 800, 291)
"""Documents of a pack: 8,192 tokens."""


@dataclass(frozen=True)
class Tuned:
    """What a kernel's autotuner chose for one key. `timings_ms` of all it tried, empty where they were not kept."""

    kernel: str
    key: tuple[Any, ...]
    config: triton.Config
    timings_ms: Mapping[triton.Config, float]

    def line(self) -> str:
        """The choice, its time, and that of the slowest that ran."""
        text = f"{self.kernel} {list(self.key)}: {self.config}"
        times = [x for x in self.timings_ms.values() if x != float("inf")]
        return f"{text}, {min(times):.4f} ms, slowest {max(times):.4f} ms" if times else text

    def entry(self) -> dict[str, Any]:
        """As fla reads it."""
        names = ("kwargs", "num_warps", "num_ctas", "num_stages", "maxnreg")
        config = {name: getattr(self.config, name) for name in names}
        return {"autotune_key": list(self.key), "config": config}


def key_hash(key: Iterable[Any]) -> str:
    """The name of a key's entry."""
    return hashlib.md5(json.dumps(list(key), separators=(",", ":"), sort_keys=True).encode()).hexdigest()


def merged(old: dict[str, Any] | None, found: list[Tuned]) -> dict[str, Any]:
    """The settings of one kernel, `old` and new. Its default, for keys that nothing was measured for, stays; a new one
    is that of the first key. ValueError where the old ones are of another Triton, whose choices need not be this one's.
    """
    assert found and len({tuned.kernel for tuned in found}) == 1
    if old is None:
        old = {"kernel_name": found[0].kernel, "triton_version": triton.__version__, "autotune_entries": {}}
    if old["triton_version"] != triton.__version__:
        raise ValueError(
            f"{found[0].kernel} was tuned with triton {old['triton_version']}, and this is {triton.__version__}"
        )
    entries = old["autotune_entries"] | {key_hash(tuned.key): tuned.entry() for tuned in found}
    return {**old, "autotune_entries": entries, "default_config": old.get("default_config", found[0].entry()["config"])}


def write(folder: Path, found: list[Tuned]) -> None:
    """Into the files of their kernels, all or none of them."""
    texts = {}
    for kernel in {tuned.kernel for tuned in found}:
        file = folder / f"{kernel}.json"
        old = json.loads(file.read_text()) if file.exists() else None
        new = merged(old, [tuned for tuned in found if tuned.kernel == kernel])
        texts[file] = json.dumps(new, indent=1) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        file.write_text(text)


def autotuners() -> list["CachedAutotuner"]:
    """Those of all of fla that is imported."""
    from fla.ops.utils.cache import CachedAutotuner

    found = {}
    for name, module in list(sys.modules.items()):
        for value in list(vars(module).values()) if name.startswith("fla.") else ():
            while value is not None and not isinstance(value, CachedAutotuner):
                # Wrappers such as triton.heuristics hold what they wrap.
                value = vars(value).get("fn") if hasattr(value, "__dict__") else None
            if value is not None:
                found[id(value)] = value
    return list(found.values())


def tune(run: Callable[[], object]) -> Iterator[Tuned]:
    """What is tuned by a call of `run`."""
    before = {id(tuner): set(tuner.cache) for tuner in autotuners()}
    run()
    torch.cuda.synchronize()
    for tuner in autotuners():
        fresh = [key for key in tuner.cache if key not in before.get(id(tuner), ())]
        for key in fresh:
            # Timings are those of the last key.
            timings = {} if key != fresh[-1] else getattr(tuner, "configs_timings", None) or {}
            medians = {config: x[0] if isinstance(x, list | tuple) else x for config, x in timings.items()}
            yield Tuned(tuner.kernel_name, key, tuner.cache[key], medians)


def short_convolution(channels: int, taps: int, of_lengths: torch.dtype) -> Callable[[], None]:
    """Forward and backward of a pack, as a KDA layer in training calls it. of_lengths: dtype of cu_seqlens."""
    from bailing_mtp.kernels.kda import short_conv

    generator = torch.Generator("cuda").manual_seed(0)
    # The input is a slice of the rows of a wider projection.
    shapes = ((sum(LENGTHS), 2 * channels), (channels, taps), (sum(LENGTHS), channels))
    wide_TX, weight_CW, upstream_TC = (
        torch.randn(shape, device="cuda", generator=generator).bfloat16() for shape in shapes
    )
    cu_seqlens = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).to(of_lengths)

    def run() -> None:
        inputs = [wide_TX[:, :channels].requires_grad_(), weight_CW.requires_grad_()]
        torch.autograd.grad(short_conv(*inputs, cu_seqlens, lengths=LENGTHS), inputs, upstream_TC)

    return run


def channels_of(arch: Architecture, tp: int) -> int:
    """Of one rank's short convolution."""
    return arch.num_heads * (2 * arch.kda_head_dim + arch.v_head_dim) // tp


def main() -> None:
    arch = preset("ling3_tiny")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    usual = f"{channels_of(arch, 1)},{channels_of(arch, 2)}"
    parser.add_argument("--channels", default=usual, help=f"default: {usual}, Ling-3.0-tiny of tp=1 and tp=2")
    parser.add_argument("--only", help="kernels to write, by name; default: all that are tuned")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    # Settings that ship would be taken, and nothing tuned.
    os.environ["FLA_CACHE_MODE"] = "disabled"
    # cu_seqlens are int64 in training. Dtypes belong to the key: int32 would only get the file's default.
    cases = itertools.product(given.channels.split(","), (torch.int64, torch.int32))
    found = [x for channels, dtype in cases for x in tune(short_convolution(int(channels), arch.conv_kernel, dtype))]
    if given.only is not None:
        names = set(given.only.split(","))
        known = {tuned.kernel for tuned in found}
        if not names <= known:
            parser.error(f"--only: {', '.join(sorted(names - known))}: not among the tuned: {', '.join(sorted(known))}")
        found = [tuned for tuned in found if tuned.kernel in names]
    for tuned in found:
        print(tuned.line(), flush=True)
    try:
        write(given.folder, found)
    except ValueError as error:
        parser.error(f"{given.folder}: {error}")


if __name__ == "__main__":
    main()
