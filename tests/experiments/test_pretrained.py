import torch
from torchvision.models import shufflenet_v2_x0_5

from experiments.pretrained import METHODS, VARIANTS, PretrainedNetwork, chosen_method, enlarged_cifar100
from tests.benchmarks.test_cifar import write_cifar


def test_the_first_images_of_each_class_are_enlarged(tmp_path):
    stream = enlarged_cifar100(dataset_root=write_cifar(tmp_path), pixels=48, per_class=20, test_per_class=2)
    sizes = {name: [len(experience.dataset) for experience in stream.streams[name]] for name in stream.streams}
    assert sizes == {"train": [190] * 10, "valid": [10] * 10, "test": [20] * 10}
    image, label, task = stream.test_stream[3].dataset[0]
    assert image.shape == (3, 48, 48)
    assert 0 <= label < 10
    assert task == 3


def test_the_classifier_makes_room_for_heads_and_statistics_stay(tmp_path):
    original = shufflenet_v2_x0_5()
    torch.save(original.state_dict(), tmp_path / "weights.pth")
    network = PretrainedNetwork(str(tmp_path / "weights.pth"), "shufflenet_v2_x0_5").train()
    images = torch.randn(4, 3, 64, 64)
    before = {name: tensor.clone() for name, tensor in network.features.named_buffers()}
    features = network.features(images)
    assert all(torch.equal(before[name], tensor) for name, tensor in network.features.named_buffers())
    original.fc = torch.nn.Identity()
    assert torch.allclose(features, original.eval()(images), atol=1e-6)
    assert network.classifier.in_features == features.shape[1] == 1024


def test_methods_and_variants_of_the_merge_are_chosen_by_name():
    assert [chosen_method(name).shown for name in (*METHODS, *VARIANTS)] == [*METHODS, *VARIANTS]
    still, drawn, apart, slower, both = (chosen_method(name).make_plugins()[-1] for name in VARIANTS)
    assert (still.fisher.name, still.fisher.mode) == ("batched", "eval")
    assert [merge.fisher.name for merge in (drawn, apart, both)] == ["batched-sampled", "batched", "batched-sampled"]
    assert (still.rate, slower.rate) == (1, 0.1)
    assert [type(merge).__name__ for merge in (drawn, apart, both)] == ["BecameMergePlugin", "HeadApart", "HeadApart"]
