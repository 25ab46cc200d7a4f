"""Strategies of Avalanche whose model or loss differs between training and evaluation, and one without an optimizer."""

import io
from copy import deepcopy

import pytest
import torch
from avalanche.benchmarks import nc_benchmark
from avalanche.logging import TextLogger
from avalanche.models import SCRModel
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.supervised import SCR, ICaRL, StreamingLDA
from torch import nn
from torch.utils.data import TensorDataset

from became_avalanche import BecameMergePlugin, GPCNSPlugin, GPMPlugin, NSCLPlugin, OWMPlugin, SGPPlugin, measure_drift

MEANS = torch.randn(4, 60, generator=torch.Generator().manual_seed(0))


class Labelled(TensorDataset):
    def __init__(self, seed):
        y = torch.arange(4).repeat(6)
        noise = torch.randn(len(y), 60, generator=torch.Generator().manual_seed(seed))
        super().__init__(MEANS[y] + 0.3 * noise, y)
        self.targets = y.tolist()


def classes():
    return nc_benchmark(Labelled(1), Labelled(2), n_experiences=2, task_labels=False, shuffle=False)


def options():
    evaluator = EvaluationPlugin(loggers=[TextLogger(io.StringIO())])
    return {"train_mb_size": 6, "train_epochs": 2, "eval_mb_size": 6, "evaluator": evaluator}


def features():
    return nn.Sequential(nn.Linear(60, 40), nn.ReLU())


def icarl(plugins):
    extractor, classifier = features(), nn.Linear(40, 4)
    optimizer = torch.optim.SGD([*extractor.parameters(), *classifier.parameters()], lr=0.1)
    return ICaRL(
        feature_extractor=extractor,
        classifier=classifier,
        optimizer=optimizer,
        memory_size=8,
        buffer_transform=None,
        fixed_memory=True,
        plugins=plugins,
        **options(),
    )


def scr(plugins):
    model = SCRModel(feature_extractor=features(), projection=nn.Linear(40, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return SCR(model=model, optimizer=optimizer, mem_size=8, batch_size_mem=4, plugins=plugins, **options())


HOSTS = {"icarl": icarl, "scr": scr}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the buffers in Avalanche's strategies
@pytest.mark.parametrize("method", [GPMPlugin, SGPPlugin, OWMPlugin])
@pytest.mark.parametrize("host", HOSTS)
def test_features_stay_protected_under(host, method):
    benchmark, drifts = classes(), []
    for plugins in ([], [method()]):
        torch.manual_seed(0)
        strategy = HOSTS[host](plugins)
        strategy.train(benchmark.train_stream[0])
        before = deepcopy(strategy.model.feature_extractor)
        strategy.train(benchmark.train_stream[1])
        strategy.eval(benchmark.test_stream)
        drifts.append(measure_drift(before, strategy.model.feature_extractor, benchmark.train_stream[0])["0"])
    assert drifts[1] < 0.5 * drifts[0]


@pytest.mark.parametrize("method", [BecameMergePlugin, GPCNSPlugin, NSCLPlugin])
@pytest.mark.parametrize("host", HOSTS)
def test_what_needs_a_loss_is_refused_under(host, method):
    strategy = HOSTS[host]([method()])
    with pytest.raises(
        ValueError, match=rf"{method.__name__} needs the loss of each batch, and the loss of {type(strategy).__name__}"
    ):
        strategy.train(classes().train_stream[0])


@pytest.mark.filterwarnings("ignore:Plugin .* implements incompatible callbacks")  # said by Avalanche
@pytest.mark.parametrize("method", [GPMPlugin, BecameMergePlugin])
def test_a_host_without_an_optimizer_is_refused(method):
    strategy = StreamingLDA(
        slda_model=features(),
        criterion=nn.CrossEntropyLoss(),
        input_size=40,
        num_classes=4,
        plugins=[method()],
        **options(),
    )
    with pytest.raises(ValueError, match=r"needs an optimizer, and StreamingLDA has none"):
        strategy.train(classes().train_stream[0])
