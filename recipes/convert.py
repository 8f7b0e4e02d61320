"""Between HF directories and sharded checkpoints: python -m recipes.convert source=<dir> target=<dir> format=hf"""

import sys
from pathlib import Path

from bailing_mtp.config import ConvertConfig, build_config

from .compose import compose
from .failure import user_errors
from .ranks import Ranks


def main(config: ConvertConfig) -> None:
    # torch takes seconds to import; mistakes in the config are reported before.
    from bailing_mtp.weights.checkpoint_files import open_checkpoint
    from bailing_mtp.weights.convert import to_hf, to_sharded
    from bailing_mtp.weights.export import require_new
    from bailing_mtp.weights.sharded.manifest import verify

    target = Path(config.target)
    require_new(target)
    files = open_checkpoint(Path(config.source))
    if files.sharded is not None:
        verify(files.directory)
    convert = to_hf if config.format == "hf" else to_sharded
    report = convert(files, target, config.max_shard_bytes)
    mtp = "with the MTP layer" if report.num_mtp_layers else "without an MTP layer"
    size_mb = report.written_bytes / 1e6
    print(f"{target}: {report.n_tensors} tensors in {len(report.files)} files, {size_mb:,.1f} MB, {mtp}")


if __name__ == "__main__":
    with user_errors(Ranks.from_environment()):
        composed = compose(ConvertConfig, "convert", sys.argv[1:])
        if composed is not None:
            main(build_config(ConvertConfig, composed))
