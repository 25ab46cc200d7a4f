import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from became_avalanche import split_miniimagenet, split_tinyimagenet
from became_avalanche.benchmarks import imagenet
from became_avalanche.benchmarks.files import forget_loaded
from tests.helpers import batch_of, half, harmed


def save(path, label, number, size, mode="RGB"):
    """Save an image with the label in red and eight times the number in green, because JPEG is not exact."""
    path.parent.mkdir(parents=True, exist_ok=True)
    colour = (label, 8 * number, 128) if mode == "RGB" else label
    Image.new(mode, (size, size), colour).save(path, quality=100, subsampling=0)


def bytes_of(experience):
    x, y = batch_of(experience)
    mean, std = (torch.tensor(v).reshape(3, 1, 1) for v in (imagenet.MEAN, imagenet.STD))
    return ((x * std + mean) * 255).round().long(), y


def numbers_of(pixels, y):
    return {(label, round(green / 8)) for label, green in zip(y.tolist(), pixels[:, 1, 9, 9].tolist(), strict=True)}


# -------------------------------------------------------------------------------------------------------- TinyImageNet

IMAGE = "tiny-imagenet-200/train/n00000005/images/n00000005_3.JPEG"


def write_tiny(root, train=5, test=1):
    """Write TinyImageNet as published, with the names in ``wnids.txt`` in reverse order."""
    folder = root / "tiny-imagenet-200"
    names = [f"n{k:08}" for k in range(200)]
    folder.mkdir(parents=True)
    (folder / "wnids.txt").write_text("\n".join(reversed(names)) + "\n")
    table = []
    for label, name in enumerate(names):
        for number in range(train):
            save(folder / "train" / name / "images" / f"{name}_{number}.JPEG", label, number, 64)
        for number in range(test):
            file = f"val_{number * 200 + label}.JPEG"
            save(folder / "val" / "images" / file, label, number, 64)
            table.append(f"{file}\t{name}\t0\t0\t62\t62\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(reversed(table)))
    return root


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def test_tiny_imagenet_in_the_order_of_wordnet_names(tiny):
    benchmark = split_tinyimagenet(dataset_root=tiny)
    assert [len(stream) for stream in benchmark.streams.values()] == [25, 25, 25]
    for t in (0, 24):
        numbers = {}
        for stream, count in (("train", 38), ("valid", 2), ("test", 8)):
            pixels, y = bytes_of(benchmark.streams[stream][t])
            assert pixels.shape == (count, 3, 64, 64)
            assert benchmark.streams[stream][t].task_label == t
            assert (pixels[:, 0, 9, 9] - (y + 8 * t)).abs().max() <= 2
            numbers[stream] = numbers_of(pixels, y)
        assert len(numbers["train"] | numbers["valid"]) == 40
        assert {label for label, _ in numbers["test"]} == set(range(8))


def test_tiny_imagenet_of_the_other_protocol(tiny):
    benchmark = split_tinyimagenet(25, dataset_root=tiny, protocol="nscl", task_order=[3, 1])
    assert set(benchmark.streams) == {"train", "test"}
    assert [len(experience.dataset) for experience in benchmark.train_stream] == [40, 40]
    pixels, y = bytes_of(benchmark.test_stream[0])
    assert (pixels[:, 0, 9, 9] - (y + 24)).abs().max() <= 2
    with pytest.raises(ValueError, match="n_tasks must divide the 200 classes of TinyImageNet; got 7"):
        split_tinyimagenet(7, dataset_root=tiny)


def test_validation_images_in_a_folder_for_each_class(tiny, tmp_path):
    folder = tiny / "tiny-imagenet-200"
    copy = tmp_path / "tiny-imagenet-200"
    copy.mkdir()
    for name in ("wnids.txt", "train"):
        (copy / name).symlink_to(folder / name)
    for line in (folder / "val" / "val_annotations.txt").read_text().splitlines():
        file, name, *_ = line.split("\t")
        (copy / "val" / name).mkdir(parents=True, exist_ok=True)
        (copy / "val" / name / file).symlink_to(folder / "val" / "images" / file)
    ours, theirs = (bytes_of(split_tinyimagenet(dataset_root=root).test_stream[7]) for root in (tmp_path, tiny))
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


def test_grey_images_become_coloured(tiny, tmp_path):
    save(tmp_path / "grey.JPEG", 77, 0, 64, "L")
    forget_loaded()
    with harmed(tiny / IMAGE, tmp_path / "aside", (tmp_path / "grey.JPEG").read_bytes()):
        pixels, _ = bytes_of(split_tinyimagenet(200, dataset_root=tiny, protocol="nscl").train_stream[5])
    forget_loaded()
    assert len(pixels) == 5
    assert (pixels[:, :, 5, 5] == 77).all(1).sum() == 1


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("wnids.txt", None, "is incomplete: .*wnids.txt is missing"),
        ("wnids.txt", b"n00000000\n", "which is missing"),
        ("wnids.txt", bytes(range(256)), "its tables are not text"),
        ("train/n00000150", None, "n00000150.images is missing"),
        ("train/n00000005/images/n00000005_3.JPEG", None, "200 classes of 4 to 5 images"),
        ("val/images/val_7.JPEG", None, "val_7.JPEG.*which is missing"),
        ("val/val_annotations.txt", half, "which is missing|is incomplete"),
        ("val", None, "is incomplete: .*is missing"),
        ("train/n00000005/images/n00000005_3.JPEG", half, "n00000005_3.JPEG cannot be decoded as an image"),
        ("val/images/val_7.JPEG", b"no image", "val_7.JPEG cannot be decoded as an image"),
    ],
)
def test_half_a_tiny_imagenet_is_refused(tiny, tmp_path, file, content, message):
    forget_loaded()
    with (
        harmed(tiny / "tiny-imagenet-200" / file, tmp_path / "aside", content),
        pytest.raises(ValueError, match=message),
    ):
        split_tinyimagenet(dataset_root=tiny)


def test_tiny_imagenet_that_is_not_there(tmp_path, monkeypatch):
    def offline(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(imagenet, "TinyImagenet", offline)
    with pytest.raises(
        FileNotFoundError, match=r"TinyImageNet is missing and could not be downloaded \(no network\); get"
    ):
        split_tinyimagenet(dataset_root=tmp_path)


# -------------------------------------------------------------------------------------------------------- miniImageNet

PER_CLASS, TRAINED = 8, 6


@pytest.fixture
def small(monkeypatch):
    """Let classes have 8 images instead of 600."""
    assert (imagenet.PER_CLASS, imagenet.TRAINED) == (600, 500)
    monkeypatch.setattr(imagenet, "PER_CLASS", PER_CLASS)
    monkeypatch.setattr(imagenet, "TRAINED", TRAINED)


def pixels_of(labels, numbers):
    images = np.zeros((len(labels), 84, 84, 3), np.uint8)
    images[..., 0], images[..., 1] = np.asarray(labels)[:, None, None], 8 * np.asarray(numbers)[:, None, None]
    return images


def dump(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content, protocol=2))


def write_parts(folder):
    for name, count in (("train", TRAINED), ("test", PER_CLASS - TRAINED)):
        labels = np.tile(np.arange(100), count)
        numbers = np.repeat(np.arange(count), 100) + (TRAINED if name == "test" else 0)
        dump(folder / f"{name}.pkl", {"images": pixels_of(labels, numbers), "labels": list(labels)})


def write_cache(folder):
    for name, classes in (("val", range(16)), ("train", range(16, 80)), ("test", range(80, 100))):
        labels = np.repeat(list(classes), PER_CLASS)
        rows = {f"n{k:08}": np.flatnonzero(labels == k).tolist() for k in classes}
        pixels = pixels_of(labels, np.tile(np.arange(PER_CLASS), len(classes)))
        dump(folder / f"mini-imagenet-cache-{name}.pkl", {"image_data": pixels, "class_dict": rows})


def write_folders(folder):
    for label in range(100):
        for number in range(PER_CLASS):
            save(folder / f"n{label:08}" / f"{number:03}.png", label, number, 84)


def write_split_folders(folder):
    for label in range(100):
        part = "train" if label % 3 else "test" if label % 2 else "val"
        for number in range(PER_CLASS):
            save(folder / part / f"n{label:08}" / f"{number:03}.jpg", label, number, 100)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("write", [write_parts, write_cache, write_folders, write_split_folders])
def test_mini_imagenet_in_each_of_its_forms(tmp_path, write):
    write(tmp_path / "miniimagenet")
    benchmark = split_miniimagenet(20, seed=37, dataset_root=tmp_path)
    assert [len(stream) for stream in benchmark.streams.values()] == [20, 20, 20]
    classes = np.random.RandomState(37).permutation(100)
    assert classes[:5].tolist() == [61, 49, 86, 78, 5]  # as in the published code
    for t in (0, 13):
        seen = set()
        for stream, count in (("train", 29), ("valid", 1), ("test", 10)):
            pixels, y = bytes_of(benchmark.streams[stream][t])
            assert pixels.shape == (count, 3, 84, 84)
            assert (pixels[:, 0, 40, 40] - torch.from_numpy(classes[5 * t + y.numpy()])).abs().max() <= 2
            numbers = numbers_of(pixels, y)
            assert len(numbers) == count
            assert not seen & numbers
            seen |= numbers
        assert seen == {(label, number) for label in range(5) for number in range(PER_CLASS)}


@pytest.mark.usefixtures("small")
def test_the_seed_orders_the_classes(tmp_path):
    write_parts(tmp_path / "miniimagenet")
    one, other = (bytes_of(split_miniimagenet(seed=seed, dataset_root=tmp_path).test_stream[0])[0] for seed in (0, 1))
    assert not torch.equal(one, other)
    with pytest.raises(ValueError, match="n_tasks must divide the 100 classes of miniImageNet; got 3"):
        split_miniimagenet(3, dataset_root=tmp_path)


def test_mini_imagenet_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"miniImageNet is missing; get train.pkl and test.pkl.*or 100 folders"):
        split_miniimagenet(dataset_root=tmp_path)


def changed(**changes):
    return lambda content: pickle.dumps({**pickle.loads(content), **changes})


WRITERS = {"parts": write_parts, "cache": write_cache, "folders": write_folders}


@pytest.fixture(scope="module")
def mini(tmp_path_factory):
    root = tmp_path_factory.mktemp("mini")
    for form, write in WRITERS.items():
        write(root / form / "miniimagenet")
    return root


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("parts/test.pkl", None, "test.pkl is missing, but other files"),
        ("parts/train.pkl", half, "is corrupt"),
        ("parts/test.pkl", changed(labels=[3] * 99), "200 images and 99 labels"),
        ("parts/test.pkl", changed(labels=[3] * 200), "100 classes of 2 images are expected"),
        ("parts/test.pkl", changed(images=np.zeros((200, 3, 84, 84), np.uint8)), r"\(3, 84, 84\) instead of"),
        ("parts/test.pkl", changed(images=np.zeros((200, 84, 84, 3))), "float64, not bytes"),
        ("parts/test.pkl", pickle.dumps({"pictures": 1}), "no arrays images, labels"),
        ("cache/mini-imagenet-cache-val.pkl", None, "cache-val.pkl is missing"),
        ("cache/mini-imagenet-cache-val.pkl", changed(class_dict={"n0": [99999]}), "class_dict"),
        ("cache/mini-imagenet-cache-val.pkl", changed(class_dict={"n0": [1]}), "100 classes of 8 images"),
        ("folders/n00000042", None, "99 classes"),
        ("folders/n00000042/003.png", None, "of 7 to 8 images"),
        ("folders/n00000042/003.png", half, "003.png cannot be decoded as an image"),
    ],
)
def test_half_a_mini_imagenet_is_refused(mini, tmp_path, file, content, message):
    forget_loaded()
    form, _, name = file.partition("/")
    with (
        harmed(mini / form / "miniimagenet" / name, tmp_path / "aside", content),
        pytest.raises(ValueError, match=message),
    ):
        split_miniimagenet(dataset_root=mini / form)


def test_folders_with_too_few_images(mini, tmp_path):
    forget_loaded()
    with pytest.raises(ValueError, match="its classes have 8 images instead of 600"):
        split_miniimagenet(dataset_root=mini / "folders")
    (tmp_path / "miniimagenet").mkdir()
    with pytest.raises(ValueError, match="it has 0 classes"):
        split_miniimagenet(dataset_root=tmp_path)
