import gzip
import io
import pickle
import struct

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from became_avalanche import five_datasets
from became_avalanche.benchmarks import five
from became_avalanche.benchmarks.files import forget_loaded
from tests.helpers import batch_of, half, harmed

SMALL = {"cifar10": (500, 100), "mnist": (600, 100), "svhn": (740, 260)}
COUNTS = {
    "cifar10": (475, 25, 100),
    "mnist": (570, 30, 100),
    "svhn": (703, 37, 260),
    "fashion-mnist": (570, 30, 100),
    "notmnist": (190, 10, 50),
}


def numbered(n, shape):
    """Images with their label in one pixel and their number in two."""
    images = np.full((n, *shape), 9, dtype=np.uint8)
    middle = (slice(None), 0) if len(shape) == 3 else (slice(None),)
    images[(*middle, 3, 0)], images[(*middle, 3, 1)], images[(*middle, 3, 2)] = (
        np.arange(n) % 10,
        np.arange(n) // 256,
        np.arange(n) % 256,
    )
    return images


def write_cifar10(root):
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    data = numbered(500, (3, 32, 32)).reshape(5, 100, 3072)
    parts = {**{f"data_batch_{k + 1}": data[k] for k in range(5)}, "test_batch": data[0]}
    for name, images in parts.items():
        content = {"data": images, "labels": [k % 10 for k in range(100)], "batch_label": name}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))


def idx(array):
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def changed(**changes):
    return lambda content: pickle.dumps({**pickle.loads(content), **changes})


def write_idx(folder, sizes, zipped=True):
    folder.mkdir(parents=True)
    for prefix, n in zip(("train", "t10k"), sizes, strict=True):
        images, labels = idx(numbered(n, (28, 28))), idx((np.arange(n) % 10).astype(np.uint8))
        for name, content in ((f"{prefix}-images-idx3-ubyte", images), (f"{prefix}-labels-idx1-ubyte", labels)):
            if zipped:
                (folder / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (folder / name).write_bytes(content)


def write_svhn(root):
    (root / "SVHN").mkdir(parents=True)
    for part, n in zip(("train", "test"), SMALL["svhn"], strict=True):
        labels = np.arange(n) % 10
        content = {"X": numbered(n, (3, 32, 32)).transpose(2, 3, 1, 0), "y": np.where(labels == 0, 10, labels)[:, None]}
        savemat(root / "SVHN" / f"{part}_32x32.mat", content, do_compression=True)


def write_letters(root):
    for part, n in (("Train", 20), ("Test", 5)):
        for label, letter in enumerate("ABCDEFGHIJ"):
            folder = root / "notMNIST" / part / letter
            folder.mkdir(parents=True)
            for k in range(n):
                image = np.full((28, 28), 9, np.uint8)
                image[3, :3] = label, 0, k
                Image.fromarray(image).save(folder / f"{k:02}.png")


def write_all(root):
    write_cifar10(root)
    write_idx(root / "MNIST" / "raw", SMALL["mnist"])
    write_idx(root / "FashionMNIST" / "raw", SMALL["mnist"], zipped=False)
    write_svhn(root)
    write_letters(root)
    return root


@pytest.fixture(autouse=True)
def small(monkeypatch):
    assert five.SIZES == {"cifar10": (50000, 10000), "mnist": (60000, 10000), "svhn": (73257, 26032)}
    monkeypatch.setattr(five, "SIZES", SMALL)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("five"))


def bytes_of(experience, name):
    x, y = batch_of(experience)
    mean, std = (torch.tensor(v).reshape(3, 1, 1) for v in (five.MEMBERS[name].mean, five.MEMBERS[name].std))
    return ((x * std + mean) * 255).round().long(), y


@pytest.mark.parametrize("order", [list(COUNTS), ["svhn", "notmnist", "cifar10"]])
def test_each_data_set_is_a_task(root, order):
    benchmark = five_datasets(order, dataset_root=root)
    for t, name in enumerate(order):
        grey = name not in ("cifar10", "svhn")
        rim = 2 if grey else 0
        seen = set()
        for stream, count in zip(("train", "valid", "test"), COUNTS[name], strict=True):
            experience = benchmark.streams[stream][t]
            assert experience.task_label == t
            if stream != "valid":  # too few images to contain all classes
                assert sorted(experience.classes_in_this_experience) == list(range(10))
            pixels, y = bytes_of(experience, name)
            assert pixels.shape == (count, 3, 32, 32)
            assert torch.equal(pixels[:, 0, rim + 3, rim], y)
            if grey:
                assert torch.equal(pixels[:, :1].expand_as(pixels), pixels)
                assert (pixels[:, :, 0] == 0).all()
                assert (pixels[:, :, :, -1] == 0).all()
                assert (pixels[:, :, 2, 2] == 9).all()
            else:
                assert (pixels[:, 1:] == 9).all()
            if stream != "test":
                numbers = [tuple(row) for row in pixels[:, 0, rim + 3, rim : rim + 3].tolist()]
                assert len(set(numbers)) == count
                assert not seen & set(numbers)
                seen |= set(numbers)


def test_constants_are_those_of_the_published_codes(root):
    constants = {name: (member.mean[0], member.std[0]) for name, member in five.MEMBERS.items()}
    assert constants == {
        "cifar10": (125.3 / 255, 63.0 / 255),
        "mnist": (0.1, 0.2752),
        "svhn": (0.4377, 0.198),
        "fashion-mnist": (0.2190, 0.3318),
        "notmnist": (0.4254, 0.4501),
    }
    x, _ = batch_of(five_datasets(["mnist"], dataset_root=root).test_stream[0])
    assert x[0, 2, 0, 0].item() == pytest.approx(-0.1 / 0.2752)


def test_the_other_protocol_and_order(root):
    benchmark = five_datasets(dataset_root=root, protocol="nscl", task_order=[4, 0])
    assert set(benchmark.streams) == {"train", "test"}
    assert [len(e.dataset) for e in benchmark.train_stream] == [200, 500]


def test_letters_as_idx_files(tmp_path):
    write_idx(tmp_path / "notMNIST" / "raw", (300, 60))
    benchmark = five_datasets(["notmnist"], dataset_root=tmp_path)
    assert [len(stream[0].dataset) for stream in benchmark.streams.values()] == [285, 60, 15]


def test_files_of_notmnist_that_are_damaged_as_published_are_left_out(tmp_path):
    write_letters(tmp_path)
    (tmp_path / "notMNIST" / "Train" / "A" / "Um9tYW5hIEJvbGQucGZi.png").touch()
    assert len(five_datasets(["notmnist"], dataset_root=tmp_path, protocol="nscl").train_stream[0].dataset) == 200


@pytest.mark.parametrize("order", [[], ["mnist", "mnist"], ["mnist", "emnist"]])
def test_orders_that_are_none(order, tmp_path):
    with pytest.raises(ValueError, match="order must name some of cifar10, mnist, svhn, fashion-mnist, notmnist"):
        five_datasets(order, dataset_root=tmp_path)


def matrices(**content):
    file = io.BytesIO()
    savemat(file, content)
    return file.getvalue()


IMAGES, SVHN = "MNIST/raw/train-images-idx3-ubyte.gz", "SVHN/test_32x32.mat"


@pytest.mark.parametrize(
    ("name", "file", "content", "message"),
    [
        ("cifar10", "cifar-10-batches-py/data_batch_3", None, "data_batch_3 is missing, but other"),
        ("cifar10", "cifar-10-batches-py/data_batch_3", half, "is corrupt"),
        ("cifar10", "cifar-10-batches-py/test_batch", gzip.compress(b"a", mtime=0), "is corrupt"),
        (
            "cifar10",
            "cifar-10-batches-py/test_batch",
            changed(data=np.zeros((100, 9), np.uint8)),
            "not a file of CIFAR-10",
        ),
        ("cifar10", "cifar-10-batches-py/test_batch", changed(labels=[0] * 100), "its labels are not 0 to 9"),
        ("mnist", IMAGES, None, "train-images-idx3-ubyte is missing, with and without .gz"),
        ("mnist", IMAGES, half, "not a readable idx file"),
        ("mnist", IMAGES, b"a web page", "not a readable idx file"),
        ("mnist", IMAGES, gzip.compress(b"no", mtime=0), "not a readable idx file"),
        ("mnist", IMAGES, gzip.compress(struct.pack(">HBBI", 0, 8, 1, 9), mtime=0), "an incomplete idx file"),
        ("mnist", IMAGES, gzip.compress(idx(numbered(100, (28, 28))), mtime=0), "100 images and 600 labels"),
        ("mnist", IMAGES, gzip.compress(idx(numbered(600, (20, 20))), mtime=0), r"\(20, 20\) instead of \(28, 28\)"),
        ("fashion-mnist", "FashionMNIST/raw/t10k-labels-idx1-ubyte", half, "an incomplete idx file"),
        ("svhn", SVHN, None, "test_32x32.mat is missing"),
        ("svhn", SVHN, half, "not a readable file of SVHN"),
        ("svhn", SVHN, b"", "not a readable file of SVHN"),
        ("svhn", SVHN, b"x" * 999, "not a readable file of SVHN"),
        ("svhn", SVHN, matrices(X=np.zeros(3), y=[1]), "not a readable file of SVHN"),
        ("svhn", SVHN, matrices(y=[1]), "not a readable file of SVHN"),
        ("svhn", SVHN, matrices(X=np.zeros((32, 32, 3, 20), np.uint8), y=np.arange(20) % 10), "instead of 260"),
        ("notmnist", "notMNIST/Test", None, "neither idx files nor a folder Test"),
        ("notmnist", "notMNIST/Train/C", None, "9 classes of 20 to 20 images"),
        ("notmnist", "notMNIST/Train/C/07.png", half, "07.png cannot be decoded as an image"),
    ],
    ids=lambda value: f"{len(value)} bytes" if isinstance(value, bytes) else None,  # MATLAB files hold the time
)
def test_half_a_data_set_is_refused(root, tmp_path, name, file, content, message):
    forget_loaded()
    with harmed(root / file, tmp_path / "aside", content), pytest.raises(ValueError, match=message):
        five_datasets([name], dataset_root=root)


def test_letters_that_were_not_all_unpacked(tmp_path):
    write_letters(tmp_path)
    for path in (tmp_path / "notMNIST" / "Train" / "C").glob("0*"):
        path.unlink()
    with pytest.raises(ValueError, match="10 classes of 10 to 20 images"):
        five_datasets(["notmnist"], dataset_root=tmp_path)


@pytest.mark.parametrize(
    ("name", "kind"), [("cifar10", "CIFAR10"), ("mnist", "MNIST"), ("svhn", "SVHN"), ("notmnist", None)]
)
def test_data_that_are_not_there(tmp_path, monkeypatch, name, kind):
    def offline(*args, **kwargs):
        raise RuntimeError("no network")

    if kind is not None:
        monkeypatch.setattr(getattr(five, kind), "__init__", offline)
    tried = r" and could not be downloaded \(no network\)" if kind else ""
    with pytest.raises(FileNotFoundError, match=rf"is missing{tried}; get .*so that .*{tmp_path.name}.* exists"):
        five_datasets([name], dataset_root=tmp_path)


@pytest.mark.parametrize(
    ("name", "kind"), [("cifar10", "CIFAR10"), ("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")]
)
def test_what_torchvision_downloads_is_found(tmp_path, monkeypatch, name, kind):
    """Torchvision writes its files to the folder in which we look for them."""

    def arrived(self, root, download):
        assert download
        write = {"cifar10": write_cifar10, "mnist": lambda r: write_idx(r / "MNIST" / "raw", SMALL["mnist"])}
        write.get(name, lambda r: write_idx(r / "FashionMNIST" / "raw", SMALL["mnist"]))(tmp_path)
        assert root == str(tmp_path)

    monkeypatch.setattr(getattr(five, kind), "__init__", arrived)
    assert len(five_datasets([name], dataset_root=tmp_path).train_stream[0].dataset) == COUNTS[name][0]
