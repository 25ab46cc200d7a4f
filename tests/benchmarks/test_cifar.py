import os
import pickle
import struct

import numpy as np
import pytest
import torch

from became_avalanche import cifar100_superclass, split_cifar100
from became_avalanche.benchmarks import cifar
from tests.helpers import batch_of


def write_cifar(root, superclass=lambda labels: labels * 7 % 20, fine=lambda labels: labels):
    """Write files like those of CIFAR-100. The first pixel of an image is its label, the next two are its number."""
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    for part, size in (("train", 50000), ("test", 10000)):
        labels = np.arange(size) % 100
        data = np.zeros((size, 3072), dtype=np.uint8)
        data[:, 0], data[:, 1], data[:, 2] = labels, np.arange(size) // 256, np.arange(size) % 256
        coarse = superclass(labels).tolist()
        content = {"data": data, "fine_labels": fine(labels).tolist(), "coarse_labels": coarse}
        with (folder / part).open("wb") as file:
            pickle.dump(content, file, protocol=2)
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_cifar(tmp_path_factory.mktemp("data"))


def pixels(experience):
    """Return the first three stored bytes of the images, and their labels."""
    x, y = batch_of(experience)
    mean, std = (value[0] for value in cifar.NORMALISATION["gpm"].values())
    return ((x[:, 0, 0, :3] * std + mean) * 255).round().long(), y


@pytest.mark.parametrize(("n_tasks", "counts"), [(10, (4750, 250, 1000)), (20, (2375, 125, 500))])
def test_tasks_are_the_classes_in_their_order(root, n_tasks, counts):
    benchmark = split_cifar100(n_tasks, dataset_root=root)
    classes = 100 // n_tasks
    for t in (0, n_tasks - 1):
        seen = set()
        for stream, count in zip(("train", "valid", "test"), counts, strict=True):
            experience = benchmark.streams[stream][t]
            assert len(experience.dataset) == count
            assert experience.task_label == t
            assert sorted(experience.classes_in_this_experience) == list(range(classes))
            raw, y = pixels(experience)
            assert torch.equal(raw[:, 0], y + t * classes)
            if stream != "test":
                numbers = set((256 * raw[:, 1] + raw[:, 2]).tolist())
                assert not seen & numbers
                seen |= numbers
        assert len(seen) == counts[0] + counts[1]


def test_pixels_are_channels_first_and_normalised(root):
    x, y = split_cifar100(5, dataset_root=root).test_stream[0].dataset[3][:2]
    assert x.shape == (3, 32, 32)
    first = [y, 0, 3]  # the label and the number of the image
    assert (x[0, 0, :3] * 63.0 + 125.3).tolist() == pytest.approx(first, abs=1e-3)
    assert x[1, 5, 5].item() == pytest.approx(-123.0 / 62.1)
    assert x[2, 5, 5].item() == pytest.approx(-113.9 / 66.7)


def test_the_other_protocol_trains_on_all_images_cropped_and_flipped(root):
    benchmark = split_cifar100(20, dataset_root=root, protocol="nscl", task_order=[7, 2])
    assert set(benchmark.streams) == {"train", "test"}
    assert [len(e.dataset) for e in benchmark.train_stream] == [2500, 2500]
    assert [e.task_label for e in benchmark.train_stream] == [0, 1]
    data = benchmark.train_stream[0].dataset
    x, y, _ = data.collate_fn([data.eval()[i] for i in range(500)])
    assert torch.equal((x[:, 0, 0, 0] * 0.267 + 0.507).mul(255).round().long(), y + 35)
    moved = data.collate_fn([data[i] for i in range(500)])[0]
    assert not torch.equal(moved, x)
    assert moved.shape == x.shape


@pytest.mark.parametrize("order", [0, 3])
def test_superclasses_in_a_published_order(root, order):
    benchmark = cifar100_superclass(order, dataset_root=root)
    assert len(benchmark.train_stream) == 20
    for t in (0, 13):
        superclass = cifar.SUPERCLASS_ORDERS[order][t]
        expected = [label for label in range(100) if label * 7 % 20 == superclass]
        for stream, count in (("train", 2375), ("valid", 125), ("test", 500)):
            x, y = batch_of(benchmark.streams[stream][t])
            assert len(y) == count
            assert (x[:, 0, 0, 0] * 255).round().long().tolist() == [expected[label] for label in y]
        assert 0 <= x.min() <= x.max() <= 1


def test_reference_scrambles_the_pixels(root):
    right, scrambled = (
        batch_of(cifar100_superclass(dataset_root=root, reference=reference).test_stream[0])[0]
        for reference in (False, True)
    )
    rows = right.flatten(1)  # pixel (i, j) of channel c is raw[3 (32 i + j) + c]
    for i, j, c in ((0, 0, 1), (0, 0, 2), (3, 5, 0)):
        assert torch.equal(scrambled[:, c, i, j], rows[:, 3 * (32 * i + j) + c])
    assert not torch.equal(right, scrambled)


def test_orders_are_permutations():
    assert all(sorted(order) == list(range(20)) for order in cifar.SUPERCLASS_ORDERS)
    with pytest.raises(ValueError, match="orders 0 to 4; got 5"):
        cifar100_superclass(5, dataset_root="anywhere")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"superclass": lambda labels: labels % 19}, "must have 20 superclasses of five classes each"),
        ({"fine": lambda labels: labels // 2}, "100 classes of 500 images are expected"),
    ],
)
def test_labels_that_are_not_those_of_cifar100(tmp_path, changes, message):
    root = write_cifar(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        cifar100_superclass(dataset_root=root)


def test_the_seed_chooses_the_validation_images(root):
    one, same, other = (pixels(split_cifar100(20, seed, dataset_root=root).valid_stream[3])[0] for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_data_that_are_not_there(tmp_path, monkeypatch):
    def offline(*args, **kwargs):
        raise RuntimeError("no network")

    monkeypatch.setattr(cifar, "CIFAR100", type("CIFAR100", (), {"__init__": offline, "url": "https://example.org"}))
    message = r"missing and could not be downloaded \(no network\).*unpack it, so that .*cifar-100-python exists"
    with pytest.raises(FileNotFoundError, match=message):
        split_cifar100(dataset_root=tmp_path)
    with pytest.raises(ValueError, match="n_tasks must divide the 100 classes of CIFAR-100; got 7"):
        split_cifar100(7, dataset_root=tmp_path)


class Hostile:
    def __reduce__(self):
        return os.system, ("echo it ran",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot mmap an empty file"),
        (b"not a pickle", "is corrupt"),
        (pickle.dumps({"data": np.zeros((2, 3072), np.uint8)}, protocol=2)[:-20], "is corrupt"),
        (pickle.dumps({"data": Hostile()}, protocol=2), r"asks for (posix|nt)\.system"),
        (pickle.dumps([1, 2]), "no arrays data, fine_labels"),
        (
            pickle.dumps(
                {"data": np.zeros((2, 3072), np.uint8), "fine_labels": [0, 1], "coarse_labels": [0, 1]}, protocol=2
            ),
            "50000 rows",
        ),
        (struct.pack("<I", 7) * 100, "is corrupt"),
    ],
    ids=["empty", "text", "truncated", "hostile", "list", "short", "noise"],
)
def test_broken_files_are_refused(tmp_path, content, message, capfd):
    (tmp_path / "cifar-100-python").mkdir()
    (tmp_path / "cifar-100-python" / "train").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        split_cifar100(dataset_root=tmp_path)
    assert "it ran" not in capfd.readouterr().out
