"""A short digest of a checkpoint's weights that does not read all of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from bailing_mtp.weights.sharded.manifest import MANIFEST_NAME

SAMPLES = 64
SAMPLE_BYTES = 65536
HEAD_BYTES = 2**20


def weights_fingerprint(directory: Path) -> str:
    """sha256 over names, sizes, heads and evenly spaced samples of the directory's safetensors files, or over the
    manifest of one of this package's own checkpoints, which names the digests of all its files.

    The same wherever the directory lies; training moves every weight, so that another step gives another digest.
    """
    manifest = directory / MANIFEST_NAME
    if manifest.is_file():
        return hashlib.sha256(manifest.read_bytes()).hexdigest()
    digest = hashlib.sha256()
    for file in sorted(directory.glob("*.safetensors")):
        n_bytes = file.stat().st_size
        digest.update(f"{file.name}:{n_bytes};".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(HEAD_BYTES))
            for index in range(SAMPLES):
                stream.seek(index * n_bytes // SAMPLES)
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()
