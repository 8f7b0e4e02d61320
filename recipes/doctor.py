"""What a checkpoint holds, and whether it trains: python -m recipes.doctor checkpoint.load=<dir>

Exit code 1 when something would not train. With graft_from=<base dir> target=<new dir> it writes a copy of the
checkpoint that has the base's MTP layer.
"""

import sys
from pathlib import Path

from bailing_mtp.config import DoctorConfig, build_config

from .compose import compose
from .failure import user_errors
from .ranks import Ranks


def main(config: DoctorConfig) -> int:
    # torch takes seconds to import; mistakes in the config are reported before.
    from bailing_mtp.weights.checkpoint_files import open_checkpoint
    from bailing_mtp.weights.diagnose import diagnose
    from bailing_mtp.weights.graft import graft
    from bailing_mtp.weights.sharded.manifest import verify

    files = open_checkpoint(Path(config.checkpoint.load))
    if files.sharded is not None:
        verify(files.directory)
    found = diagnose(files)
    width = max(len(name) for name, _ in found.rows)
    print("\n".join(f"{name:<{width}}  {value}" for name, value in found.rows))
    for problem in found.problems:
        print(f"would not train: {problem}")
    if config.graft_from is None or config.target is None:
        return int(bool(found.problems))
    from bailing_mtp.data.tokenizer import load_tokenizer

    base = open_checkpoint(Path(config.graft_from))
    if base.sharded is not None:
        verify(base.directory)
    digests = [
        load_tokenizer(side.directory).digest if (side.directory / "tokenizer.json").is_file() else None
        for side in (files, base)
    ]
    report = graft(files, base, Path(config.target), digests[0], digests[1], config.max_embedding_difference)
    print("\n".join(report))
    return 0


if __name__ == "__main__":
    with user_errors(Ranks.from_environment()):
        composed = compose(DoctorConfig, "doctor", sys.argv[1:])
        if composed is not None:
            raise SystemExit(main(build_config(DoctorConfig, composed)))
