"""Charts hold the numbers of metrics.jsonl, in axes that say what they show."""

import json
import math
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from bailing_mtp.config import ConfigError, PlotConfig, build_config
from bailing_mtp.errors import UserError
from recipes.charts import CHARTS, draw, write_charts
from recipes.panels import COLOURS, SMOOTH_FROM_POINTS, Run
from recipes.plot import main


def run(label: str = "a", n_steps: int = 6, scale: float = 1.0) -> Run:
    rows = []
    for step in range(1, n_steps + 1):
        row = {"step": step, "train/lm_loss": scale * 9.0 / step, "mtp/loss_depth1": scale * 10.0 / step}
        row |= {"mtp/loss_depth2": scale * 11.0 / step, "train/tokens_per_second": 1000.0 + step}
        row |= {"mtp/accept_depth1": step / 10, "mtp/accept_depth2": 0.5, "train/grad_norm": 2.0}
        if step % 3 == 0:
            row |= {"valid/lm_loss": scale * 9.5 / step, "valid/mtp_loss_depth2": 12.0, "mtp/grad_norm": None}
        rows.append(row)
    return Run(label, rows)


def axes_of(figure: Figure | None, title: str) -> Axes:
    return next(axes for axes in figure.axes if axes.get_title(loc="left") == title)


def lines_of(axes: Axes) -> dict[str, tuple[list, list]]:
    return {line.get_label(): tuple(map(list, line.get_data())) for line in axes.lines}


def test_one_run_shows_its_losses_together():
    axes = axes_of(draw([run()], CHARTS["loss"]), "Loss")
    lines = lines_of(axes)
    assert list(lines) == [
        "language model", "language model, held out", "MTP depth 1", "MTP depth 2", "MTP depth 2, held out"
    ]  # fmt: skip
    assert lines["language model"] == ([1, 2, 3, 4, 5, 6], [9.0 / n for n in range(1, 7)])
    assert lines["language model, held out"] == ([3, 6], [9.5 / 3, 9.5 / 6])
    colours = {line.get_label(): line.get_color() for line in axes.lines}
    assert colours["MTP depth 2"] == colours["MTP depth 2, held out"] == COLOURS[2] != colours["MTP depth 1"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("optimizer step", "nats per token")
    assert [text.get_text() for text in axes.get_legend().get_texts()] == list(lines)


def test_several_runs_have_a_panel_per_metric_and_a_colour_each():
    figure = draw([run("plain"), run("half", scale=0.5)], CHARTS["loss"])
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["Loss: language model", "Loss: MTP depth 1", "Loss: MTP depth 2"]
    lines = lines_of(figure.axes[1])
    assert lines["half"][1] == [5.0 / n for n in range(1, 7)] and lines["plain"][1][0] == 10.0
    assert [line.get_color() for line in figure.axes[1].lines] == list(COLOURS[:2])


def test_acceptance_becomes_tokens_per_step_beside_plain():
    lines = lines_of(axes_of(draw([run()], CHARTS["accept_length"]), "Tokens per verify step"))
    assert lines["predicted from acceptance"][1] == pytest.approx([1 + 1.5 * n / 10 for n in range(1, 7)])
    assert set(lines["plain = 1.0"][1]) == {1.0}


def test_a_policy_run_shows_reward_and_accept_length_with_those_of_held_out_prompts():
    rows = [{"step": 0, "valid/reward_mean": 0.25, "valid/accept_length": 2.5}]
    for step in range(1, 5):
        lengths = {"rollout/accept_length": 2.0, "predicted/accept_length": 2.1}
        rows.append({"step": step, "reward/mean": step / 10, **lengths})
    rows[-1] |= {"valid/reward_mean": 0.5, "valid/accept_length": 2.25, "policy/loss": 0.1}
    reward, length, loss = draw([Run("a", rows)], CHARTS["rl"]).axes
    assert lines_of(reward) == {"mean": ([1, 2, 3, 4], [0.1, 0.2, 0.3, 0.4]), "mean, held out": ([0, 4], [0.25, 0.5])}
    lines = lines_of(length)
    assert lines["measured"][1] == [2.0] * 4 and lines["measured, held out"] == ([0, 4], [2.5, 2.25])
    assert lines["predicted from acceptance"][1] == [2.1] * 4 and set(lines["plain = 1.0"][1]) == {1.0}
    assert list(lines_of(loss)) == ["loss"]
    # A chart without its first panel is none: a pretraining run predicts an accept length, but has no rewards.
    assert draw([run()], CHARTS["rl"]) is None


def test_noisy_series_get_a_mean_that_ends_where_they_do():
    n_steps = SMOOTH_FROM_POINTS
    wobble = [{"step": n, "train/tokens_per_second": 100.0 + 10 * (-1) ** n} for n in range(1, n_steps + 1)]
    raw, mean = draw([Run("a", wobble)], CHARTS["throughput"]).axes[0].lines
    assert raw.get_alpha() < 0.5 and list(raw.get_ydata()) == [row["train/tokens_per_second"] for row in wobble]
    assert list(mean.get_xdata()) == list(raw.get_xdata())
    assert max(abs(y - 100) for y in mean.get_ydata()[1:-1]) < 4
    (short,) = draw([Run("a", wobble[: n_steps - 1])], CHARTS["throughput"]).axes[0].lines
    assert list(short.get_ydata()) == [row["train/tokens_per_second"] for row in wobble[: n_steps - 1]]


def test_a_log_point_that_measured_nothing_is_a_gap():
    shares = [0.9, 0.8, None, 0.7, None, 0.6, 0.5]
    rows = [
        {"step": n, "mtp/accept_depth1": 0.5, "valid/mtp_accept_depth1": 0.4 if n in (1, 7) else None}
        | ({} if share is None else {"mtp/accept_depth2": share})
        for n, share in enumerate(shares, start=1)
    ]
    axes = axes_of(draw([Run("a", rows)], CHARTS["acceptance"]), "Drafts that the trunk would accept")
    whole, held_out, broken = axes.lines
    assert list(whole.get_ydata()) == [0.5] * 7 and whole.get_markevery() == []
    assert list(held_out.get_data()[0]) == [1, 7]
    expected = [math.nan if share is None else share for share in shares]
    assert list(broken.get_ydata()) == pytest.approx(expected, nan_ok=True)
    # The point between two gaps belongs to no line, so that it has a mark.
    assert broken.get_markevery() == [3]
    promised = lines_of(axes_of(draw([Run("a", rows)], CHARTS["accept_length"]), "Tokens per verify step"))
    values = [math.nan if share is None else 1.5 + 0.5 * share for share in shares]
    assert promised["predicted from acceptance"][1] == pytest.approx(values, nan_ok=True)

    many = [{"step": n, "train/tokens_per_second": None if n == 9 else 100.0} for n in range(2 * SMOOTH_FROM_POINTS)]
    _, mean = draw([Run("a", many)], CHARTS["throughput"]).axes[0].lines
    assert [n for n, y in enumerate(mean.get_ydata()) if math.isnan(y)] == [9] and mean.get_ydata()[8] == 100.0


def test_depths_come_in_order_and_empty_charts_not_at_all():
    rows = [{"step": 1, **{f"mtp/accept_depth{depth}": 0.5 for depth in (10, 9, 1)}}]
    axes = axes_of(draw([Run("a", rows)], CHARTS["acceptance"]), "Drafts that the trunk would accept")
    assert list(lines_of(axes)) == ["MTP depth 1", "MTP depth 9", "MTP depth 10"]
    assert axes.get_ylim() == (0, 1)
    assert draw([run()], CHARTS["reward"]) is None
    assert draw([Run("a", [{"step": 1, "reward/mean": None}])], CHARTS["reward"]) is None


def test_files_are_written_at_readme_width(tmp_path: Path):
    files = write_charts([run()], tmp_path / "charts")
    assert [file.name for file in files] == [
        "overview.png", "loss.png", "acceptance.png", "accept_length.png", "throughput.png", "optimizer.png"
    ]  # fmt: skip
    with Image.open(files[1]) as image:
        assert image.width == 864
        found = {colour for _, colour in image.convert("RGB").getcolors(maxcolors=1 << 20)}
    assert {tuple(bytes.fromhex(colour[1:])) for colour in COLOURS[:3]} <= found


def plot(**values: str) -> None:
    main(build_config(PlotConfig, values))


def test_the_verb_reads_run_directories(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        lines = "".join(json.dumps(row) + "\n" for row in run().rows)
        (tmp_path / name / "metrics.jsonl").write_text(lines)
    plot(runs=f"{tmp_path}/one")
    assert str(tmp_path / "one" / "charts" / "loss.png") in capsys.readouterr().out.splitlines()
    plot(runs=f"{tmp_path}/one,{tmp_path}/two", labels="first,second", output=f"{tmp_path}/out")
    assert (tmp_path / "out" / "loss.png").is_file() and not (tmp_path / "one" / "charts" / "compared").exists()
    with pytest.raises(ConfigError, match="labels: 'x' must name each of the 2 runs"):
        plot(runs=f"{tmp_path}/one,{tmp_path}/two", labels="x")
    with pytest.raises(UserError, match="runs: .*three holds no metrics.jsonl"):
        plot(runs=f"{tmp_path}/three")
