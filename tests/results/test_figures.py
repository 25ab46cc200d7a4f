import io

import numpy as np
import pytest
from matplotlib.figure import Figure

from became_avalanche.results.figures import (
    FIGURES,
    NothingToDrawError,
    comparison_figure,
    landscape_figure,
    main_labels,
    path_figure,
    run_figure,
    save_figure,
)
from became_avalanche.results.record import StageRecord, TaskRecord, with_joint
from became_avalanche.results.scans import Landscape, PathScan
from tests import oracles
from tests.results.records import made_up, make_spec, matrix_of

METHODS = ["finetune", "gpm", "gpm-2x", "gpm+became", "joint"]
WALL = [f"{base}{end}" for base in ("gpm", "sgp", "trgp", "nscl", "owm") for end in ("", "-2x", "+became")]


def task_of(method, t):
    """Return a task with all optional measurements."""
    stages = [StageRecord(epochs=2, training_loss=[t + 2.0, t + 1.0], validation_loss=[t + 2.5, None])]
    stages += [StageRecord(epochs=1, training_loss=[t + 0.5], validation_loss=[t + 0.75])] * ("+" in method and t > 0)
    ranks = {"conv.weight": 3 * t + 1, "fc.weight": 5 * t + 2} if method.startswith("gpm") else {}
    first = (t + 1) / 10
    return TaskRecord(stages=stages, first_epoch_accuracy=first, ranks=ranks, memory_bytes={"Plugin": 2**20 * (t + 1)})


def runs(methods=METHODS, seeds=2):
    """Return runs with all measurements, including joint training on the first 1, 2 and 3 tasks."""
    records, prefixes = [], []
    for seed in range(seeds):
        for method in methods:
            tasks = [task_of(method, t) for t in range(1 if method == "joint" else 3)]
            records.append(made_up(method, seed, tasks=tasks))
        for n in (1, 2, 3):
            spec = {**make_spec("joint", seed), "n_tasks": n}
            accuracy = [[None] * n] * (n - 1) + [[0.9 + n / 100] * n]
            prefixes.append(made_up("joint", seed, n, spec=spec, accuracy={"test": accuracy}))
    measured = with_joint([record for record in records if not record.is_joint] + prefixes)
    return measured[: -len(prefixes)] + [record for record in records if record.is_joint]


def drawn(name, records, **kwargs):
    return FIGURES[name].draw(records, **kwargs)


def axes_of(figure):
    (axes,) = figure.axes
    return axes


def line(axes, label):
    (found,) = [line for line in axes.lines if str(line.get_label()).partition(" (")[0] == label]
    return found


def panel(figure, title):
    return next(axes for axes in figure.axes if title in (axes.get_title(), axes.get_xlabel()))


def mean_matrix(method, seeds=2):
    return 100 * np.mean([matrix_of(method, seed) for seed in range(seeds)], axis=0)


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_drawn_alone_and_into_given_axes(tmp_path, name):
    records = runs()
    drawn(name, records).savefig(tmp_path / "figure.png", dpi=30)  # a figure is laid out only when it is rendered
    figure = Figure()
    left, right = figure.subplots(1, 2)
    assert drawn(name, records, ax=right) is figure
    assert right.has_data()
    assert not left.has_data()


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_says_what_it_lacks_or_is_drawn(name):
    bare = [made_up("finetune", 0, converted={})]
    if name in ("aoa", "bwt_im", "coefficients", "ranks", "costs", "losses"):
        with pytest.raises(NothingToDrawError, match="none of these runs"):
            drawn(name, bare)
    else:
        drawn(name, bare)
    if name != "comparison":
        with pytest.raises(NothingToDrawError):
            drawn(name, [made_up("gpm", 0, status="failed", accuracy={}, tasks=[], converted={})])


def test_training_shows_each_task_and_the_mean_over_those_seen():
    axes = panel(drawn("training", runs()), "gpm")
    matrix = mean_matrix("gpm")
    for i, found in enumerate(axes.lines[:3]):
        np.testing.assert_allclose(found.get_xydata(), [(t + 1, matrix[t, i]) for t in range(i, 3)])
    np.testing.assert_allclose(axes.lines[3].get_ydata(), [np.mean(matrix[t, : t + 1]) for t in range(3)])


def test_the_numbers_of_tasks_with_the_same_end_stand_beside_each_other():
    level = [[0.9, None, None], [0.8, 0.7, None], [0.75, 0.75, 0.75]]
    axes = panel(drawn("training", [made_up("gpm", 0, accuracy={"test": level})]), "gpm")
    assert len({text.xyann[0] for text in axes.texts}) == 3


def test_matrix_is_that_of_the_records():
    axes = panel(drawn("matrix", runs()), "gpm-2x")
    matrix = mean_matrix("gpm-2x")
    np.testing.assert_allclose(axes.images[0].get_array().filled(np.nan), np.where(np.tri(3), matrix, np.nan))
    low, high = axes.images[0].get_clim()
    everything = [matrix_of(run.label, run.seed) for run in runs() if not run.is_joint]
    assert low <= 100 * np.nanmin(everything) <= 100 * np.nanmax(everything) <= high
    assert [text.get_text() for text in axes.texts] == [f"{matrix[t, i]:.0f}" for t in range(3) for i in range(t + 1)]


def test_average_and_final_accuracy():
    matrix = mean_matrix("gpm+became")
    axes = axes_of(drawn("average", runs()))
    np.testing.assert_allclose(line(axes, "gpm+became").get_ydata(), [matrix[t, : t + 1].mean() for t in range(3)])
    stds = [100 * np.std(matrix_of("gpm+became", seed)[-1]) for seed in range(2)]
    found = line(axes_of(drawn("final", runs())), "gpm+became")
    np.testing.assert_allclose(found.get_ydata(), matrix[-1])
    assert found.get_label() == f"gpm+became (STD {np.mean(stds):.1f})"


def test_aoa_starts_with_the_second_task():
    np.testing.assert_allclose(line(axes_of(drawn("aoa", runs())), "gpm").get_xydata(), [(2, 20), (3, 30)])


def test_bwt_against_im():
    axes = axes_of(drawn("bwt_im", runs()))
    points = {container.get_label(): container.lines[0].get_xydata()[0] for container in axes.containers}
    assert points.keys() == {"finetune", "gpm", "gpm-2x", "gpm+became"}
    ims = [np.mean(np.array([0.91, 0.92, 0.93]) - np.diag(matrix_of("gpm", seed))) for seed in range(2)]
    bwts = [oracles.bwt(matrix_of("gpm", seed)) for seed in range(2)]
    np.testing.assert_allclose(points["gpm"], [100 * np.mean(ims), 100 * np.mean(bwts)])


def test_coefficients_and_one_over_t():
    axes = axes_of(drawn("coefficients", runs()))
    for label in ("gpm+became", "1/t"):
        np.testing.assert_allclose(line(axes, label).get_xydata(), [(2, 1 / 2), (3, 1 / 3)])


def test_ranks_of_each_layer():
    axes = panel(drawn("ranks", runs()), "gpm")
    np.testing.assert_allclose(line(axes, "fc").get_xydata(), [(1, 2), (2, 7), (3, 12)])
    np.testing.assert_allclose(line(axes, "conv").get_ydata(), [1, 4, 7])


def test_a_single_epoch_leaves_room_for_its_losses():
    """Without enough room, constrained layout warns and gives up."""
    stage = StageRecord(epochs=1, training_loss=[0.5], validation_loss=[0.4])
    run = made_up("gpm", 0, 1, tasks=[TaskRecord(stages=[stage])])
    figure = FIGURES["losses"].draw([run])
    figure.savefig(io.BytesIO())
    (axes,) = figure.axes
    (name,) = axes.texts
    assert axes.bbox.x0 <= name.get_window_extent().x0
    assert name.get_window_extent().y1 <= axes.title.get_window_extent().y0


def test_losses_of_both_stages():
    axes = panel(drawn("losses", runs()), "task 3")
    found = [found.get_xydata().tolist() for found in axes.lines]
    assert found[0] == [[1, 4], [2, 3]]
    assert found[1][0] == [1, 4.5]
    assert np.isnan(found[1][1][1])
    assert found[2:] == [[[3, 2.5]], [[3, 2.75]]]
    assert [text.get_text() for text in axes.texts] == ["stage 1", "stage 2"]
    one_stage = made_up("finetune+became", 0, tasks=[TaskRecord(stages=[StageRecord(epochs=1, training_loss=[1.0])])])
    assert drawn("losses", [one_stage, *runs()])._suptitle.get_text() == "gpm+became, seed 0"


def test_costs():
    figure = drawn("costs", runs())
    assert panel(figure, "memory MiB").containers[0].lines[0].get_xdata()[0] == 3
    assert panel(figure, "seconds").containers[0].lines[0].get_xdata()[0] == 1.5


# ------------------------------------------------------------------------------------------------------------ many


def test_the_main_labels_are_the_best_merge_with_its_references_and_the_best_others():
    records = runs(["finetune", *WALL])
    shown = main_labels(records)
    assert len(shown) == 6
    accs = {m: np.mean([oracles.acc(matrix_of(m, seed)) for seed in range(2)]) for m in ["finetune", *WALL]}
    best = max((method for method in WALL if "+" in method), key=accs.get)
    base = best.removesuffix("+became")
    assert {best, base, f"{base}-2x"} <= set(shown)
    others = sorted((m for m in accs if m not in (best, base, f"{base}-2x")), key=accs.get)[-3:]
    assert set(shown) == {best, base, f"{base}-2x", *others}
    assert shown == [method for method in ["finetune", *WALL] if method in shown]


def test_the_few_have_different_looks_in_grey():
    axes = axes_of(drawn("average", runs(["finetune", *WALL])))
    lines = [found for found in axes.lines if not str(found.get_label()).startswith("_")]
    assert len({(found.get_marker(), found.get_linestyle()) for found in lines}) == len(lines) == 6
    assert len({found.get_color() for found in lines}) == 6


def test_merging_methods_have_different_colours_even_if_they_matter_less():
    records = runs(["finetune", *WALL])
    lines = [found for found in axes_of(drawn("coefficients", records)).lines if found.get_label() != "1/t"]
    assert len({found.get_color() for found in lines}) == len(lines) == 5
    average = axes_of(drawn("average", records))
    both = [found for found in lines if found.get_label() in main_labels(records)]
    assert both
    for found in both:
        assert line(average, found.get_label()).get_color() == found.get_color()


def test_a_label_has_one_look_in_all_panels():
    figure = comparison_figure(runs())
    first = line(figure.axes[0], "gpm+became")
    dots = dict(zip(METHODS[:-1], panel(figure, "ACC %").containers, strict=False))
    assert line(panel(figure, "task"), "gpm+became").get_color() == first.get_color()
    assert dots["gpm+became"].lines[0].get_color() == first.get_color()
    assert dots["gpm+became"].lines[0].get_marker() == first.get_marker()


def test_many_methods_are_one_row_of_large_panels():
    figure = comparison_figure(runs(["finetune", *WALL]), title="a title")
    assert len(figure.axes) == 4
    assert figure.get_suptitle() == "a title"
    assert len(panel(figure, "ACC %").get_yticklabels()) == 16
    assert len({axes.get_position().y0 for axes in figure.axes}) == 1


def test_dots_are_the_rows_of_the_table():
    figure = comparison_figure(runs(METHODS[:-1]))
    accs = [np.mean([np.mean(matrix_of(method, seed)[-1]) for seed in range(2)]) for method in METHODS[:-1]]
    dots = [container.lines[0] for container in panel(figure, "ACC %").containers]
    np.testing.assert_allclose([dot.get_xdata()[0] for dot in dots], 100 * np.array(accs))


def test_runs_that_are_not_done_are_not_drawn_but_counted():
    records = [made_up(method, seed) for method in ("gpm", "sgp") for seed in range(3)]
    records[0] = made_up("gpm", 0, status="diverged", accuracy={"test": [[0.1, None, None]]})
    figure = comparison_figure(records)
    assert [text.get_text() for text in panel(figure, "ACC %").get_yticklabels()] == ["gpm (2 of 3)", "sgp"]
    expected = 100 * np.mean([matrix_of("gpm", seed) for seed in (1, 2)], axis=0)
    assert line(figure.axes[0], "gpm").get_ydata()[0] == pytest.approx(expected[0, 0])


def test_one_legend_below_the_figure_covers_no_lines():
    records = [record.model_copy(update={"label": f"{record.label} with a long explanation"}) for record in runs()]
    for figure in (comparison_figure(records), comparison_figure(runs())):
        assert all(panel.get_legend() is None for panel in figure.axes)
        figure.draw_without_rendering()
        top = figure.legends[0].get_window_extent().y1
        assert all(top <= panel.get_tightbbox().y0 for panel in figure.axes)
        texts = [text.get_text() for text in figure.legends[0].get_texts()]
        assert len(texts) == len(set(texts)) > 2


@pytest.mark.parametrize("methods", [METHODS, ["gpm"], ["joint"], ["finetune+became", "gpm+became"]])
def test_comparisons_are_drawn(tmp_path, methods):
    records = [made_up(method, seed) for method in methods for seed in range(2)]
    comparison_figure(records).savefig(tmp_path / "comparison.png")
    assert (tmp_path / "comparison.png").stat().st_size > 5_000
    run_figure(records[0]).savefig(tmp_path / "run.png")


def test_a_run_that_stopped_early_is_drawn_as_far_as_it_came(tmp_path):
    matrix = [[0.9, None, None], [0.8, 0.7, None]]
    figure = run_figure(made_up("gpm", 0, status="diverged", accuracy={"test": matrix}))
    drawn_lines = [list(found.get_ydata()) for found in figure.axes[0].lines]
    assert [[round(value, 9) for value in values] for values in drawn_lines] == [[90, 80], [70], [90, 75]]
    figure.savefig(tmp_path / "run.png")
    run_figure(made_up("gpm", 0, status="running", accuracy={})).savefig(tmp_path / "empty.png")


# ----------------------------------------------------------------------------------------------------------- merges


def test_path_figure_marks_the_least_loss_and_the_merge(tmp_path):
    scan = PathScan(
        t=2,
        coefficients=[0, 0.5, 1],
        loss=[[1, 2, 5], [4, 1, 0]],
        accuracy=[[1, 1, 1], [1, 1, 1]],
        chosen=0.25,
        plasticity=1,
    )
    figure = path_figure([scan], [{"1/t": 0.75}])
    axes = axes_of(figure)
    *_, mean, least, chosen, mark = (np.array(found.get_xydata()).tolist() for found in axes.lines)
    assert mean == [[0, 2.5], [0.5, 1.5], [1, 2.5]]
    assert least == [[0.5, 1.5]]
    assert chosen[0][0] == 0.25
    assert mark == [[0.75, 2.0]]
    assert "1/t" in [text.get_text() for text in axes.get_legend().get_texts()]
    figure.savefig(tmp_path / "path.png")


def test_landscape_shows_the_four_points(tmp_path):
    x, y = np.linspace(-1, 2, 5), np.linspace(-1, 1, 5)
    bowl = (x[None] - 1) ** 2 + y[:, None] ** 2
    points = {"anchor": (0.0, 0.0), "base": (1.0, 0.0), "candidate": (1.5, 0.5), "merged": (1.25, 0.25)}
    landscape = Landscape(
        t=3,
        x=x.tolist(),
        y=y.tolist(),
        loss=[(bowl + k).tolist() for k in range(3)],
        accuracy=[np.full((5, 5), 0.5).tolist()] * 3,
        points=points,
    )
    figure = landscape_figure(landscape)
    for axes in figure.axes[:6]:
        *_, path, anchor, base, candidate, merged = (found.get_xydata().tolist() for found in axes.lines)
        assert path == [[1, 0], [1.5, 0.5]]
        assert [anchor, base, candidate, merged] == [[list(points[name])] for name in points]
    assert [axes.get_title() for axes in figure.axes[:3]] == ["tasks 1 to 2", "task 3", "all tasks"]
    loss, accuracy = figure.axes[2].collections[0], figure.axes[5].collections[0]
    assert loss.get_cmap()(0.0) == accuracy.get_cmap()(1.0)  # bright is good
    pair = {name: [getattr(landscape, name)[0]] * 2 for name in ("loss", "accuracy")}
    assert landscape_figure(landscape.model_copy(update={"t": 2, **pair})).axes[0].get_title() == "task 1"
    paths = save_figure(figure, tmp_path / "landscape", dpi=30)
    assert [path.read_bytes()[:4] for path in paths] == [b"%PDF", b"\x89PNG"]
