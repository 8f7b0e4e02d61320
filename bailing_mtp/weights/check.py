"""Does a checkpoint hold the tensors that an architecture asks for? Decided from headers alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.weights.checkpoint_files import TORCH_DTYPES, CheckpointError, CheckpointFiles
from bailing_mtp.weights.names import Shape, mtp_hf_shapes, mtp_prefix, trunk_hf_shapes

MAX_LISTED = 10


@dataclass(frozen=True)
class TensorCheck:
    """Names that differ from what the architecture asks for, trunk and MTP layer apart."""

    missing: tuple[str, ...]
    extra: tuple[str, ...]
    unusable: tuple[str, ...]
    """Wrong shape or dtype: 'name: BF16 [2, 3], expected [3, 3]'."""
    mtp_present: tuple[str, ...]
    """All tensors under the MTP layer's prefix, right or wrong."""
    mtp_missing: tuple[str, ...]
    mtp_wrong: tuple[str, ...]
    """Under the MTP layer's prefix, but not a tensor of that layer, or unusable."""

    @property
    def mtp_complete(self) -> bool:
        return bool(self.mtp_present) and not self.mtp_missing and not self.mtp_wrong

    def require_trunk(self, files: CheckpointFiles) -> None:
        """Raises CheckpointError listing every kind of difference of the trunk."""
        _refuse(files, {"missing": self.missing, "not in this model": self.extra, "unusable": self.unusable})

    def require_mtp(self, files: CheckpointFiles) -> None:
        """Raises CheckpointError unless the MTP layer is whole."""
        where = " (MTP layer)"
        _refuse(files, {"missing" + where: self.mtp_missing, "wrong" + where: self.mtp_wrong})


def check_tensors(files: CheckpointFiles, arch: Architecture) -> TensorCheck:
    """Compare the stored tensors with the architecture's. Reads nothing."""
    trunk = trunk_hf_shapes(arch)
    mtp = mtp_hf_shapes(replace(arch, num_mtp_layers=1))
    prefix = mtp_prefix(arch)
    in_mtp = [name for name in files.tensors if name.startswith(prefix)]
    alien = [f"{name}: not a tensor of this layer" for name in in_mtp if name not in mtp]
    return TensorCheck(
        missing=tuple(name for name in trunk if name not in files.tensors),
        extra=tuple(n for n in files.tensors if n not in trunk and not n.startswith(prefix)),
        unusable=tuple(_unusable(files, trunk)),
        mtp_present=tuple(in_mtp),
        mtp_missing=tuple(name for name in mtp if name not in files.tensors),
        mtp_wrong=(*alien, *_unusable(files, mtp)),
    )


def _unusable(files: CheckpointFiles, expected: dict[str, Shape]) -> list[str]:
    found = []
    for name, shape in expected.items():
        stored = files.tensors.get(name)
        if stored is None:
            continue
        if stored.shape != shape:
            found.append(f"{name}: {list(stored.shape)}, expected {list(shape)}")
        elif stored.dtype not in TORCH_DTYPES:
            found.append(f"{name}: {stored.dtype}, allowed: {', '.join(TORCH_DTYPES)}")
    return found


def _refuse(files: CheckpointFiles, kinds: dict[str, tuple[str, ...]]) -> None:
    lines = []
    for kind, names in kinds.items():
        if names:
            more = [f"... and {len(names) - MAX_LISTED} more"] if len(names) > MAX_LISTED else []
            lines += [f"{len(names)} {kind}:", *(f"  {name}" for name in (*names[:MAX_LISTED], *more))]
    if lines:
        raise CheckpointError(f"{files.directory}: tensors do not fit this model\n" + "\n".join(lines))
