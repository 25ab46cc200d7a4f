import json
import re
from collections import Counter
from statistics import fmean

import pytest

from became_avalanche.results.published import published
from became_avalanche.results.record import read_record
from became_avalanche.results.scans import Landscape, PathScan, read_scans
from became_avalanche.results.statistics import Spread
from became_avalanche.runs.spec import read_spec
from became_avalanche.runs.store import differences
from experiments import tables
from experiments.tables import PAGES, ROOT, RUNS, STUDIES, records_in, regenerated


@pytest.fixture(scope="module")
def studies():
    return {study: records_in(study) for study in STUDIES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_records(page):
    assert regenerated(page.read_text()) == page.read_text()


def test_a_table_that_was_changed_by_hand_is_written_anew():
    page = (ROOT / "README.md").read_text()
    changed = re.sub(r"(?<=\| gpm\+became \| )\d\d\.\d\d", "99.99", page)
    assert changed != page
    assert regenerated(changed) == page


def test_the_first_paragraph_of_the_results_quotes_the_tables_of_its_page():
    page = (ROOT / "docs" / "results.md").read_text()
    measured = "".join(mark[0] for mark in tables.MARKED.finditer(page)).replace("-", "−")
    quoted = re.findall(r"[+−]\d+\.\d+", page.split("\n\n")[1])
    assert len(quoted) > 5
    assert [number for number in quoted if number not in measured] == []


def test_the_summary_has_the_gains_of_the_study_with_most_seeds():
    summary = tables.summary(ROOT / "experiments" / "studies").splitlines()
    study = ROOT / "experiments" / "studies" / "permuted-digits-nscl-20.toml"
    row = next(line for line in tables.comparison(study).splitlines() if line.startswith("| nscl+became |"))
    over_method, over_control = row.split(" | ")[2:4]
    assert f"| permuted-digits | nscl | 20 | {over_method} | {over_control} |" in summary
    assert sum("| permuted-digits | nscl |" in line for line in summary) == 1


def test_the_gains_of_a_table_are_those_over_the_method_and_over_its_control():
    study = ROOT / "experiments" / "studies" / "permuted-digits-nscl-20.toml"
    acc = {}
    for record in records_in(study):
        acc.setdefault(record.label, {})[record.seed] = fmean(record.accuracy["test"][-1])
    shown = tables.comparison(study).replace("\N{NO-BREAK SPACE}", " ").splitlines()
    rows = {cells[0]: cells for line in shown[2:] for cells in [line.strip("| ").split(" | ")]}
    assert shown[0] == "| method | ACC % | over the method alone | over equal training | BWT % | epochs |"
    for column, reference in ((2, "nscl"), (3, "nscl-2x")):
        gain = fmean(acc["nscl+became"][seed] - value for seed, value in acc[reference].items())
        assert re.fullmatch(rf"{re.escape(f'{100 * gain:+.2f}')} \[\S+, \S+\]", rows["nscl+became"][column])
    assert not any(cell.strip() for row in ("nscl", "nscl-2x") for cell in rows[row][2:4])


def test_a_table_says_how_many_seeds_each_method_has_if_they_differ():
    folder = ROOT / "experiments" / "results" / "pretrained"
    runs = Counter(record.label for record in tables.records_in_folder(folder))
    assert len(set(runs.values())) > 1
    heading, _, *rows = tables.runs(folder).splitlines()
    assert heading.startswith("| method | seeds | ")
    assert {cells[0]: int(cells[1]) for row in rows for cells in [row.strip("| ").split(" | ")]} == runs
    same = tables.comparison(ROOT / "experiments" / "studies" / "permuted-digits-nscl-20.toml")
    assert "| seeds |" not in same.splitlines()[0]


def test_a_difference_from_the_paper_is_in_points_and_in_its_standard_deviations():
    paper = Spread(mean=0.5749, std=0.0065, n=3)
    assert tables.difference(Spread(0.5619, 0.02, 3), paper) == "-1.30 (2.0 sd)"
    assert tables.difference(Spread(0.58, None, 1), Spread(0.57, None, 1)) == "+1.00"


def test_published_results_stand_next_to_ours():
    studies = ROOT / "experiments" / "studies"
    lines = tables.reported(studies).replace("\N{NO-BREAK SPACE}", " ").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines[2:]]
    by_cell = {(benchmark, method, metric): cells for benchmark, method, metric, *cells in rows}
    assert len(by_cell) == len(rows)
    runs = [run for run in records_in(studies / "10-split-cifar100-cpu-ten.toml") if run.label == "gpm"]
    matrices = [run.accuracy["test"] for run in runs]
    ours = {
        "acc": fmean(fmean(rows[-1]) for rows in matrices),
        "bwt": fmean(fmean(rows[-1][t] - rows[t][t] for t in range(9)) for rows in matrices),
    }
    for name, sign in (("acc", ""), ("bwt", "+")):
        paper = published(runs[0])[name]
        shown, published_cell, points, _ = by_cell["10-split-cifar100-cpu", "gpm", f"{name.upper()} %"]
        assert shown.startswith(f"{100 * ours[name]:{sign}.2f} ")
        assert published_cell == f"{100 * paper.mean:{sign}.2f} ± {100 * paper.std:.2f}"
        assert points.startswith(f"{100 * (ours[name] - paper.mean):+.2f} (")
    assert not any("(default)" in method for _, method, _ in by_cell)


def test_results_next_to_the_papers_come_from_the_first_study_of_a_method(monkeypatch):
    studies, few = ROOT / "experiments" / "studies", "10-split-cifar100-cpu"
    monkeypatch.setattr(tables, "PUBLISHED", ("10-split-cifar100-cpu-ten",))
    expected = tables.reported(studies).splitlines()
    monkeypatch.setattr(tables, "PUBLISHED", ("10-split-cifar100-cpu-ten", few))  # has GPM with fewer seeds, too
    lines = tables.reported(studies).splitlines()
    assert lines[: len(expected)] == expected
    assert not any("| gpm |" in line for line in lines[len(expected) :])


def test_a_misspelt_kind_of_table_is_an_error():
    with pytest.raises(ValueError, match="unknown kind of table 'tables'; did you mean 'table'"):
        regenerated("<!-- tables: experiments/studies/split-digits.toml -->\n<!-- end -->")


def test_a_table_of_merges_that_are_not_there_is_an_error():
    with pytest.raises(ValueError, match=r"no files split-digitz.seed\*.json in .*merges"):
        regenerated("<!-- merges: experiments/results/merges/split-digitz -->\n<!-- end -->")


def test_every_study_has_a_table_and_a_figure_and_every_mark_has_its_end():
    marks = [mark for page in PAGES for mark in tables.MARKED.finditer(page.read_text())]
    sources = [mark["source"] for mark in marks]
    assert {str(study.relative_to(ROOT)) for study in STUDIES} <= set(sources)
    assert sum(len(re.findall(r"<!-- \w+: ", page.read_text())) for page in PAGES) == len(marks)
    assert {path.stem for path in tables.FIGURES.iterdir()} == {study.stem for study in STUDIES}
    for page in PAGES:
        for figure in re.findall(r"\]\(([^)]*\.png)\)", page.read_text()):
            assert (page.parent / figure).is_file(), figure


@pytest.mark.parametrize("state", ["missing", "failed"])
def test_a_study_that_is_incomplete_is_an_error(state, tmp_path, monkeypatch):
    study = tmp_path / "tiny.toml"
    study.write_text('benchmarks = ["split-digits"]\nmethods = ["gpm"]\n')
    spec, record = next((spec, RUNS.find(spec)) for spec in tables.Study.read(study).specs())
    monkeypatch.setattr(tables, "RUNS", tables.Store(tmp_path))
    if state == "failed":
        folder = tables.RUNS.open(spec)
        folder.save_record(record.model_copy(update={"status": "failed", "error": "no more disk"}))
    with pytest.raises(ValueError, match=rf"tiny.toml is incomplete: split-digits.gpm.seed0.* is {state}"):
        records_in(study)


def test_a_figure_is_drawn_for_each_study(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "FIGURES", tmp_path)
    study = ROOT / "experiments" / "studies" / "10-split-cifar100-cpu.toml"
    tables.draw(study)
    assert (tmp_path / f"{study.stem}.png").read_bytes().startswith(b"\x89PNG")


# ----------------------------------------------------------------------------------------------- committed records


def test_each_run_has_the_folder_that_its_specification_names():
    folders = sorted(RUNS.root.iterdir())
    assert len(folders) > 400
    for folder in folders:
        record, spec = read_record(folder / "record.json"), read_spec(folder / "spec.json")
        assert (folder.name, record.key) == (spec.key(), spec.key())
        assert not differences(record.spec, spec.completed().model_dump(mode="json"))  # options may be newer
        assert record.references == spec.references
        assert (record.method, record.status) == (spec.method.name, "done")
        scans = {path.name for kind in (PathScan, Landscape) for path in folder.glob(f"{kind.__name__.lower()}-*.json")}
        assert {path.name for path in folder.iterdir()} - scans == {"record.json", "spec.json"}
        assert len(read_scans(PathScan, folder)) + len(read_scans(Landscape, folder)) == len(scans)


def test_each_run_is_committed_once_and_used(studies):
    used = {record.key for records in studies.values() for record in records}
    prefixes = {spec.key() for study in STUDIES for spec in tables.Study.read(study).specs() if spec.method.joint}
    unfinished = (ROOT / "experiments" / "studies" / "long").glob("*.toml")
    waiting = {spec.key() for study in unfinished for spec in tables.Study.read(study).specs()}
    assert used <= (folders := {folder.name for folder in RUNS.root.iterdir()}) <= used | prefixes | waiting
    assert sum(map(len, studies.values())) > len(used)
    assert len(folders - used - waiting) == 20  # joint training on 1 to 4 of the five tasks of split-digits, five seeds


def test_a_gain_is_over_runs_that_are_there(studies):
    for records in studies.values():
        keys = {record.key for record in records}
        for record in records if len(keys) > 1 else ():  # a single run is compared with nothing
            references = set(record.references.model_dump().values()) - {None}
            if ":" not in record.method:  # plugins of experiments/ are compared with the package's own
                assert references <= keys, record.key


def test_no_command_in_the_docs_writes_into_committed_results():
    for page in PAGES:
        assert not re.search(r"--out[ =]\S*experiments", page.read_text()), page


def test_nothing_of_the_old_format_is_left():
    assert not [path for name in ("results.json", "table.csv") for path in (ROOT / "experiments").rglob(name)]


def test_the_table_of_speed_is_the_measured_one():
    measured = json.loads((ROOT / "experiments" / "speed" / "measured.json").read_text())
    page = (ROOT / "docs" / "speed.md").read_text()
    rows = [row for own in measured.values() for row in own]
    assert page.count("| yes |") + page.count("| **no** |") == len(rows)
    assert all(f"| {row['what']} | {row['value']:.4g} | {row['goal']} |" in page for row in rows)


def test_every_figure_is_in_the_docs_with_its_command_and_small():
    page = (ROOT / "docs" / "figures.md").read_text()
    for path, name, _ in tables.pictures(ROOT / "docs" / "figures"):
        assert f"]({path.relative_to(ROOT / 'docs')})" in page
        assert f"--figure {name}" in page
        assert path.stat().st_size < 150_000


def test_what_merges_forget_adds_up_to_bwt():
    study = ROOT / "experiments" / "studies" / "trgp-free-stage-permuted-digits.toml"
    rows = {cells[0]: cells for row in tables.jumps(study).splitlines() for cells in [row.strip("| ").split(" | ")]}
    runs = [run for run in records_in(study) if run.label == "published, repaired"]
    first = [run.accuracy["test"] for run in runs]
    bwt = fmean(fmean(rows[-1][i] - rows[i][i] for i in range(9)) for rows in first)
    losses = [max(task.stages[1].training_loss) for run in runs for task in run.tasks[1:]]
    mean, largest, highest, above, part, whole = rows["published, repaired"][1:]
    assert whole == f"{100 * bwt:+.2f}"
    assert highest == f"{max(losses):.2f}"
    assert above == f"{sum(loss > 0.2 for loss in losses)} of 27"
    assert float(largest) == pytest.approx(max(merge.delta_norm for run in runs for merge in run.merges), abs=0.005)
    assert float(mean) < float(largest)
    assert float(whole) < float(part) < 0
    assert rows["trgp+became"][3:6] == ["–"] * 3
    assert rows["slow free stage"][4:6] == ["0 of 27", "+0.00"]
    assert "trgp-2x" not in rows  # has no merge


def test_losses_between_stages_are_means_over_the_tasks_with_two_stages():
    folder = ROOT / "experiments" / "results" / "plain-heads"
    run = next(run for run in tables.records_in_folder(folder) if run.label == "gpm+became")
    pairs = [[stage.training_loss for stage in task.stages] for task in run.tasks[1:]]
    first = sum(stages[1][0] for stages in pairs) / 19
    above = sum(stages[1][0] > stages[0][0] for stages in pairs)
    row = next(line for line in tables.stages(folder).splitlines() if line.startswith("| gpm+became |"))
    assert row.split(" | ")[2] == f"{first:.2f}"
    assert row.endswith(f" {above} of 19 tasks |")
    assert above > 0
    assert "| gpm |" not in tables.stages(folder)  # has no second stage
