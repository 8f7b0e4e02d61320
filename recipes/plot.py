"""Charts of one or several runs: python -m recipes.plot runs=<run_dir>[,<run_dir>...] [labels=a,b] [output=<dir>]"""

import sys
from pathlib import Path

from bailing_mtp.config import PlotConfig, build_config, split_list
from bailing_mtp.errors import UserError
from bailing_mtp.training.metrics import read_metrics

from .charts import Run, write_charts
from .compose import compose
from .failure import user_errors
from .ranks import Ranks


def main(config: PlotConfig) -> None:
    paths = [Path(item) for item in split_list(config.runs)]
    labels = split_list(config.labels) if config.labels else [path.resolve().name for path in paths]
    runs = [Run(label, read_metrics(_metrics_of(path))) for label, path in zip(labels, paths, strict=True)]
    default = paths[0] / "charts" if len(paths) == 1 else paths[0] / "charts" / "compared"
    for file in write_charts(runs, Path(config.output) if config.output else default):
        print(file)


def _metrics_of(run_dir: Path) -> Path:
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"runs: {run_dir} holds no metrics.jsonl; name the run_dir of a run that has logged")
    return path


if __name__ == "__main__":
    ranks = Ranks.from_environment()
    with user_errors(ranks):
        composed = compose(PlotConfig, "plot", sys.argv[1:])
        if composed is not None and ranks.is_first:
            main(build_config(PlotConfig, composed))
