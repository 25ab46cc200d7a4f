from types import SimpleNamespace

import numpy as np
import pytest

from became_avalanche.results.figures import comparison_figure, path_figure, run_figure
from tests.results.records import made_up, matrix_of

METHODS = ["finetune", "gpm", "gpm-2x", "gpm+became", "joint"]


def runs(methods, seeds=2):
    return [made_up(method, seed) for seed in range(seeds) for method in methods]


def panel(figure, label):
    """The panel with this title or label of the x axis."""
    return next(axes for axes in figure.axes if label in (axes.get_title(), axes.get_xlabel()))


def test_curves_are_means_over_seeds():
    axes = panel(comparison_figure(runs(METHODS)), "gpm")
    expected = 100 * np.mean([matrix_of("gpm", seed) for seed in range(2)], axis=0)
    *tasks, mean = (line.get_ydata() for line in axes.lines)
    for i, curve in enumerate(tasks):
        np.testing.assert_allclose(curve, expected[i:, i])
    np.testing.assert_allclose(mean, np.nanmean(expected, axis=1))


def test_labels_are_in_the_order_of_the_records():
    figure = comparison_figure(runs(METHODS[::-1]), title="a title")
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert titles == [method for method in METHODS[::-1] if method != "joint"]
    assert [text.get_text() for text in panel(figure, "ACC %").get_yticklabels()] == METHODS[::-1]
    assert [sub.get_suptitle().splitlines()[0] for sub in figure.subfigs[:1]] == ["a title"]


def test_dots_are_the_rows_of_the_table():
    axes = panel(comparison_figure(runs(METHODS)), "ACC %")
    accs = [np.mean([np.mean(matrix_of(method, seed)[-1]) for seed in range(2)]) for method in METHODS]
    dots = [container.lines[0] for container in axes.containers]
    np.testing.assert_allclose([dot.get_xdata()[0] for dot in dots], 100 * np.array(accs))
    assert [dot.get_color() for dot in dots] == ["0.55", "0.55", "0.55", "black", "0.55"]
    assert len(panel(comparison_figure(runs(METHODS)), "BWT %").containers) == 4


def test_runs_that_are_not_done_are_not_drawn_but_counted():
    records = runs(["gpm", "sgp"], seeds=3)
    records[0] = made_up("gpm", 0, status="diverged", accuracy={"test": [[0.1, None, None]]})
    figure = comparison_figure(records)
    assert [text.get_text() for text in panel(figure, "ACC %").get_yticklabels()] == ["gpm (2 of 3)", "sgp"]
    expected = 100 * np.mean([matrix_of("gpm", seed) for seed in (1, 2)], axis=0)
    np.testing.assert_allclose(panel(figure, "gpm").lines[0].get_ydata(), expected[:, 0])


def test_every_merging_method_has_a_line():
    merging = [f"gpm+rule-{k}" for k in range(13)]
    legend = next(axes.get_legend() for axes in comparison_figure(runs(merging)).axes if axes.get_legend())
    assert [text.get_text() for text in legend.get_texts()] == [*merging, "1/t"]


@pytest.mark.parametrize("methods", [METHODS, ["gpm"], ["joint"], ["finetune+became", "gpm+became"]])
def test_figures_are_drawn(tmp_path, methods):
    comparison_figure(runs(methods)).savefig(tmp_path / "comparison.png")
    assert (tmp_path / "comparison.png").stat().st_size > 5_000
    run_figure(runs(methods)[0]).savefig(tmp_path / "run.png")


def test_a_run_that_stopped_early_is_drawn_as_far_as_it_came(tmp_path):
    matrix = [[0.9, None, None], [0.8, 0.7, None]]
    figure = run_figure(made_up("gpm", 0, status="diverged", accuracy={"test": matrix}))
    assert [list(line.get_ydata()) for line in figure.axes[0].lines] == [[90, 80], [70], [90, 75]]
    figure.savefig(tmp_path / "run.png")
    run_figure(made_up("gpm", 0, status="running", accuracy={})).savefig(tmp_path / "empty.png")


def test_path_figure_marks_the_least_loss_and_the_merge(tmp_path):
    scan = SimpleNamespace(
        t=2, coefficients=[0, 0.5, 1], loss=[[1, 2, 5], [4, 1, 0]], cumulative_loss=[5, 3, 5], best=0.5, chosen=0.25
    )
    figure = path_figure([scan], [{"1/t": 0.75}])
    (axes,) = figure.axes
    *_, mean, least, chosen, mark = (np.array(line.get_xydata()).tolist() for line in axes.lines)
    assert mean == [[0, 2.5], [0.5, 1.5], [1, 2.5]]
    assert least == [[0.5, 1.5]]
    assert chosen[0][0] == 0.25
    assert mark == [[0.75, 2.0]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["1/t"]
    figure.savefig(tmp_path / "path.png")
