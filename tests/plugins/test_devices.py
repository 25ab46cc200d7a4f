"""What would go wrong on a GPU, found without one.

Whole trainings run on the CPU under a mode that forbids what would be a silent transfer or a wait there: tensors made
without a device, and values read off a tensor during a step. Steps of the guards run on fake tensors of a CUDA device,
which know their device and shape but have no values: operands on different devices, and values that are read, raise.
What cannot be tried so: kernels and their rounding, several GPUs at once, streams, and the backward pass on a device.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import became_avalanche
from became_avalanche import (
    BecameMergePlugin,
    ConnectorPlugin,
    Fisher,
    GPCNSPlugin,
    GPMPlugin,
    NSCLPlugin,
    OWMPlugin,
    SGPPlugin,
    TrainingPlateauPlugin,
    TRGPPlugin,
)
from became_avalanche.layers.model import map_layers
from became_avalanche.plugins.guard import Guard, Step
from became_avalanche.strategy import passes
from became_avalanche.subspace import backward
from became_avalanche.subspace.basis import Projector
from tests.helpers import CONV_SHAPE, Spy, blobs, convnet, mlp, naive

PACKAGE = str(Path(became_avalanche.__file__).parent)
MODES = ("__torch_function__", "__torch_dispatch__")
FACTORIES = {
    *(torch.zeros, torch.ones, torch.full, torch.empty, torch.eye, torch.arange, torch.linspace, torch.tensor),
    *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.as_tensor),
}


def caller(through=""):
    """Return the place in the package that called torch; None if the call came from elsewhere.

    :param through: frames of files with this in their path do not count.
    """
    frame = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_name in MODES
        or frame.f_code.co_filename == __file__
        or (through and through in frame.f_code.co_filename)
    ):
        frame = frame.f_back
    if frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
    return None


class Factories(TorchFunctionMode):
    """Records the tensors that the package creates without a device."""

    def __init__(self):
        self.found = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        on_a_tensor = func is torch.as_tensor and isinstance(args[0], torch.Tensor)
        if func in FACTORIES and "device" not in (kwargs or {}) and not on_a_tensor and (place := caller()):
            self.found.add(f"{place}: {func.__name__}")
        return func(*args, **(kwargs or {}))


class Reads(TorchDispatchMode):
    """Records where the package reads a value from a tensor during a training step."""

    def __init__(self):
        super().__init__()
        self.found, self.in_step = set(), False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.in_step and func is torch.ops.aten._local_scalar_dense.default and (place := caller("/torch/")):
            self.found.add(place)
        return func(*args, **(kwargs or {}))


FAMILY = {
    "gpm": lambda: [GPMPlugin()],
    "gpm, biases too": lambda: [GPMPlugin(bias="augment")],
    "sgp": lambda: [SGPPlugin()],
    "trgp": lambda: [TRGPPlugin(trust_threshold=0.1, reference=True)],
    "gpcns": lambda: [GPCNSPlugin()],
    "nscl": lambda: [NSCLPlugin(100)],
    "owm": lambda: [OWMPlugin()],
    "connector": lambda: [NSCLPlugin(100, reference=True), ConnectorPlugin()],
}


@pytest.mark.parametrize("name", FAMILY)
def test_tensors_have_a_device_and_steps_read_no_values(name):
    factories, reads = Factories(), Reads()
    spies = [
        Spy(before_training_iteration=lambda s: setattr(reads, "in_step", True)),
        Spy(after_training_iteration=lambda s: setattr(reads, "in_step", False)),
    ]
    merge = [] if name == "connector" else [BecameMergePlugin(rule="became-tensor", fisher=Fisher("batched-sampled"))]
    plugins = [spies[0], *FAMILY[name](), *merge, TrainingPlateauPlugin(), spies[1]]
    strategy = naive(convnet(), plugins, train_epochs=1)
    with factories, reads:
        strategy.train(blobs(n_tasks=2, shape=CONV_SHAPE, samples=20).train_stream)
    assert factories.found == set()
    known = {"trgp.py"} if name == "trgp" else set()  # it reads the task label of each batch, to choose its weights
    assert {place for place in reads.found if place.split(":")[0] not in known} == set()


def test_the_modes_notice():
    """Both checks find a planted mistake."""

    factories, reads = Factories(), Reads()
    reads.in_step = True
    code = compile("torch.zeros(3)\nfloat(torch.ones(1, device='cpu').sum())", f"{PACKAGE}/careless.py", "exec")
    with factories, reads:
        exec(code, {"torch": torch})
    assert factories.found == {"careless.py:1 <module>: zeros"}
    assert reads.found == {"careless.py:2 <module>"}


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=False),
    "momentum and decay": lambda parameters: torch.optim.SGD(
        parameters, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=False
    ),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, foreach=False),
}


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # by torch itself
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("idempotent", [True, False])
def test_steps_stay_on_a_device_that_is_not_the_cpu(optimizer, idempotent, monkeypatch):
    """Runs on fake tensors, which raise an error if a CPU tensor is mixed in or a value is read."""
    monkeypatch.setattr(backward, "WORTHWHILE", -float("inf"))
    with FakeTensorMode():
        try:
            torch.empty(1, device="cuda").uniform_()
        except RuntimeError:
            pytest.skip("fake CUDA tensors of this torch need a driver")
        model = nn.Sequential(nn.Linear(6, 5, device="cuda"), nn.Conv2d(4, 4, 3, groups=2, device="cuda"))
        layers, parameters = map_layers(model), dict(model.named_parameters())
        guards = []
        for name, rows in (("0.weight", (1, 6, 2)), ("1.weight", (2, 18, 3))):
            project = Projector(torch.empty(rows, device="cuda"), complement=False, idempotent=idempotent)
            outputs = torch.ones(5, dtype=torch.bool, device="cuda") if name == "0.weight" else None
            guards.append(Guard(name, [parameters[name]], project, layers.protected[name], outputs))
        guards.append(Guard("0.bias", [parameters["0.bias"]], torch.zeros_like))
        steps = OPTIMIZERS[optimizer](parameters.values())
        for _ in range(2):
            for parameter in parameters.values():
                parameter.grad = torch.empty_like(parameter)
            step = Step(
                linear=optimizer != "adam",
                momentum=optimizer == "momentum and decay",
                fresh=not steps.state,
                decays={id(p): group["weight_decay"] for group in steps.param_groups for p in group["params"]},
            )
            with torch.no_grad():
                for guard in guards:
                    assert not guard.in_backward
                    guard.enter_forward(step)
                    guard.leave_forward()
                    guard.before_update(step)
                steps.step()
                for guard in guards:
                    guard.after_update()
        assert {parameter.device.type for parameter in parameters.values()} == {"cuda"}


def test_random_states_of_all_devices_are_kept(monkeypatch):
    calls = []

    class Fork:
        def __init__(self, devices, device_type):
            calls.append((list(devices), device_type))

        def __enter__(self):
            return None

        def __exit__(self, *error):
            return None

    monkeypatch.setattr(torch.random, "fork_rng", Fork)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    for device in ("cpu", "cuda", "cuda:1"):
        with passes.kept_random_state(device):
            pass
    assert calls == [([], "cuda"), ([0, 1, 2], "cuda"), ([0, 1, 2], "cuda")]


def test_sampled_labels_leave_the_random_state_alone():
    states = []
    for merge in ([], [BecameMergePlugin(fisher="sampled")]):
        torch.manual_seed(0)
        strategy = naive(mlp(), merge, train_epochs=1)
        strategy.train(blobs(n_tasks=1).train_stream)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
