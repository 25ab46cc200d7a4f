import numpy as np
import pytest
import torch
from torch.nn import functional as F

from became_avalanche import Landscape, PathScan, Store, measure_landscape, open_merge, scan_kept_path
from became_avalanche.analysis.endpoints import AnalysisError, Plane, kept_tasks
from became_avalanche.results.record import RecordError
from became_avalanche.results.scans import read_scan, read_scans
from became_avalanche.runs.run import Local, run
from tests.helpers import batch_of
from tests.runs.components import BLOBS, IMAGES


def trained(root, method="gpm+became", benchmark=BLOBS, keep="endpoints", n_tasks=3):
    store = Store(root)
    record = run(benchmark.spec(method, 0, n_tasks=n_tasks), store, Local(keep=keep))
    assert record.status == "done", record.error
    return record, store.root / record.key


@pytest.fixture(scope="module", params=["blobs", "running statistics"])
def run_in_folder(request, tmp_path_factory):
    method, benchmark = {"blobs": ("gpm+became", BLOBS), "running statistics": ("nscl+became", IMAGES)}[request.param]
    return trained(tmp_path_factory.mktemp("runs"), method, benchmark)


def vector(weights, names):
    return np.concatenate([weights[name].double().numpy().ravel() for name in names])


def test_the_merged_point_has_the_accuracies_of_the_record(run_in_folder):
    record, folder = run_in_folder
    assert kept_tasks(folder) == [2, 3]
    for t in kept_tasks(folder):
        kept = open_merge(folder, t)
        names = [name for name, _ in kept.strategy.model.named_parameters() if name in kept.base]
        plane = Plane.through(kept.anchor, kept.base, kept.candidate, names)
        x, y = plane.candidate_at
        at = ((1 - kept.coefficient) * plane.width + kept.coefficient * x, kept.coefficient * y)
        merged = plane.at(*at)
        kept.strategy.model.load_state_dict({**kept.strategy.model.state_dict(), **merged})
        for i, experience in enumerate(kept.testing):
            inputs, labels = batch_of(experience)
            logits = kept.strategy.model.eval()(inputs, torch.full((len(inputs),), experience.task_label))
            accuracy = float((logits.argmax(-1) == labels).double().mean())
            assert accuracy == pytest.approx(record.accuracy["test"][t - 1][i])


def test_the_landscape_is_that_of_the_plane(run_in_folder):
    _, folder = run_in_folder
    kept = open_merge(folder, 2)
    landscape = measure_landscape(kept, n_samples=None, size=4)
    model = kept.strategy.model.eval()
    names = [name for name, _ in model.named_parameters() if name in kept.base]
    anchor, base, candidate = (vector(weights, names) for weights in (kept.anchor, kept.base, kept.candidate))
    first = (base - anchor) / np.linalg.norm(base - anchor)
    rest = (candidate - anchor) - first * (first @ (candidate - anchor))
    second = rest / np.linalg.norm(rest)
    for name, weights in (("anchor", anchor), ("base", base), ("candidate", candidate)):
        expected = (first @ (weights - anchor), second @ (weights - anchor))
        np.testing.assert_allclose(landscape.points[name], expected, atol=1e-6)
    merged = base + kept.coefficient * (candidate - base)
    np.testing.assert_allclose(
        landscape.points["merged"], [first @ (merged - anchor), second @ (merged - anchor)], atol=1e-6
    )
    xs, ys = zip(*landscape.points.values(), strict=True)
    assert landscape.x[0] < min(xs) < max(xs) < landscape.x[-1]
    assert landscape.y[0] < min(ys) < max(ys) < landscape.y[-1]

    row, column = 2, 1
    point = anchor + landscape.x[column] * first + landscape.y[row] * second
    # running statistics are combined in the same way, but do not count for distances
    b = landscape.y[row] / landscape.points["candidate"][1]
    a = (landscape.x[column] - b * landscape.points["candidate"][0]) / landscape.points["base"][0]
    state, at = {}, 0
    for name, tensor in model.state_dict().items():
        if name in names:
            state[name] = torch.tensor(point[at : at + tensor.numel()]).reshape(tensor.shape).float()
            at += tensor.numel()
        elif tensor.is_floating_point():
            one, two, three = kept.anchor[name], kept.base[name], kept.candidate[name]
            state[name] = one + a * (two - one) + b * (three - one)
        else:
            state[name] = kept.candidate[name]
    model.load_state_dict(state)
    for i, (training, testing) in enumerate(zip(kept.training, kept.testing, strict=True)):
        x, y = batch_of(training)
        logits = model(x, torch.full((len(x),), training.task_label)).detach()
        assert landscape.loss[i][row][column] == pytest.approx(float(F.cross_entropy(logits, y)), rel=1e-4)
        x, y = batch_of(testing)
        logits = model(x, torch.full((len(x),), testing.task_label)).detach()
        assert landscape.accuracy[i][row][column] == pytest.approx(
            float((logits.argmax(-1) == y).double().mean()), abs=1e-5
        )


def test_the_path_goes_from_base_to_candidate_and_is_kept_beside_the_record(run_in_folder, tmp_path):
    record, folder = run_in_folder
    kept = open_merge(folder, 3)
    scan = scan_kept_path(kept, n_samples=None, step=0.5)
    assert (scan.t, scan.chosen, scan.coefficients) == (3, record.merges[1].coefficient, [0, 0.5, 1])
    model = kept.strategy.model.eval()
    for k, weights in ((0, kept.base), (2, kept.candidate)):
        model.load_state_dict({**model.state_dict(), **weights})
        for i, experience in enumerate(kept.training):
            x, y = batch_of(experience)
            logits = model(x, torch.full((len(x),), experience.task_label)).detach()
            assert scan.loss[i][k] == pytest.approx(float(F.cross_entropy(logits, y)), rel=1e-4)
    path = PathScan.path(tmp_path, 3)
    path.write_text(scan.to_json())
    assert path.name == "pathscan-003.json"
    assert read_scans(PathScan, tmp_path) == [scan]
    assert read_scans(Landscape, tmp_path) == []
    path.write_text(scan.to_json().replace('"t": 3', '"t": 4'))
    with pytest.raises(RecordError, match="does not match its checksum"):
        read_scan(PathScan, path)
    with pytest.raises(RecordError, match="cannot read"):
        read_scan(PathScan, tmp_path / "nowhere")
    path.write_text('{"schema_version": 1}')
    with pytest.raises(RecordError, match="is corrupt"):
        read_scan(PathScan, path)


def test_runs_that_cannot_be_analysed_say_why(tmp_path):
    _, folder = trained(tmp_path / "a", keep="checkpoint", n_tasks=2)
    with pytest.raises(AnalysisError, match=r"does not have the weights of the merge of task 2: train .* with --keep"):
        open_merge(folder, 2)
    _, folder = trained(tmp_path / "b", "finetune+became", n_tasks=2)
    scan_kept_path(open_merge(folder, 2), n_samples=5, step=1)
    with pytest.raises(AnalysisError, match="lie on one line, so they span no plane"):
        measure_landscape(open_merge(folder, 2))
    with pytest.raises(ValueError, match="size must be at least 2; got 1"):
        measure_landscape(open_merge(folder, 2), size=1)
    _, folder = trained(tmp_path / "c", "trgp+became", n_tasks=2)
    with pytest.raises(AnalysisError, match="TRGP keeps its scales in the plugin"):
        open_merge(folder, 2)
    (folder / "endpoints-002.safetensors").write_bytes(b"damaged")
    with pytest.raises(AnalysisError, match=r"endpoints-002\.safetensors"):
        open_merge(folder, 2)
