"""Kernel settings that ship with the library, handed to fla before it is imported."""

import os
from pathlib import Path

import torch

from bailing_mtp.config import RunConfig
from bailing_mtp.parallel.context import ParallelContext

FOLDER = Path(__file__).resolve().parents[1] / "bailing_mtp" / "kernels"
MEASURED = {(9, 0): "fla_h200"}
"""Folder of settings by compute capability."""


def prepare_kernels(config: RunConfig, context: ParallelContext) -> None:
    """On a GPU, where kernels are compiled on first use: choose fla's settings, and say what the wait will be."""
    if context.device.type != "cuda":
        return
    rollout = getattr(config, "rollout", None)
    uses_fla = config.model.kda == "fla" or (rollout is not None and rollout.kernels == "triton")
    if not uses_fla:
        return
    chosen = fla_settings(torch.cuda.get_device_capability(context.device), config.model.dtype)
    for name, value in chosen.items():
        os.environ.setdefault(name, value)
    if context.is_writer:
        tuned = Path(os.environ["FLA_CONFIG_DIR"]).name if "FLA_CONFIG_DIR" in os.environ else None
        wait = f"fla takes its settings from {tuned}" if tuned else "fla also tunes them on this GPU, for minutes"
        print(f"kernels: compiled on first use, so that the first steps are slow; {wait}", flush=True)


def fla_settings(capability: tuple[int, int], dtype: str) -> dict[str, str]:
    """Environment variables of fla for this kind of GPU; none where nothing was measured.

    Mode "full" also serves sizes that were not measured, from each kernel's default: tuned again, every kernel
    would cost seconds for each of them. In fp32 those defaults need not fit the GPU's shared memory.
    """
    folder = MEASURED.get(capability)
    if folder is None or dtype != "bf16":
        return {}
    return {"FLA_CACHE_MODE": "full", "FLA_CONFIG_DIR": str(FOLDER / folder)}
