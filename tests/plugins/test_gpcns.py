"""Which gradient GPCNS remembers."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from became_avalanche import BecameMergePlugin, GPCNSPlugin
from tests.helpers import Spy, batch_of, blobs, mlp, naive, stream_of

NAMES = ("features.0.weight", "features.2.weight")


def gram(columns):
    return (columns[0].double() @ columns[0].double().T).numpy()


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("merged", [False, True])
def test_gradient_is_that_of_the_weights_that_stay(merged, position):
    """It is the gradient over all data of the experience, in eval mode, after the merge, for any order of plugins."""
    gradients = {name: [] for name in NAMES}

    def keep(strategy):
        model, experience = strategy.model, strategy.experience
        x, y = batch_of(experience)
        loss = F.cross_entropy(model(x, experience.task_label), y)
        for name, gradient in zip(
            NAMES, torch.autograd.grad(loss, [model.get_parameter(name) for name in NAMES]), strict=True
        ):
            gradients[name].append(gradient.double().numpy())

    plugin = GPCNSPlugin(n_samples=None)
    plugins = [plugin, *([BecameMergePlugin()] if merged else [])]
    plugins = plugins if position == 0 else plugins[::-1]
    stream_of([*plugins, Spy(after_training_exp=keep)])
    for name in NAMES:
        stacked = np.vstack(gradients[name])
        expected = stacked.T @ stacked
        actual = gram(plugin.memory[name]["gradients"])
        np.testing.assert_allclose(actual, expected, atol=1e-4 * np.trace(expected))


def test_reference_takes_what_the_last_step_left():
    kept = {}

    def keep(strategy):
        kept.update({name: strategy.model.get_parameter(name).grad.double().numpy() for name in NAMES})

    plugin = GPCNSPlugin(reference=True)
    first, second, _ = blobs().train_stream
    strategy = naive(mlp(), [plugin, Spy(after_training_exp=keep)])
    strategy.train(first)
    for name in NAMES:
        expected = kept[name].T @ kept[name]
        np.testing.assert_allclose(gram(plugin.memory[name]["gradients"]), expected, atol=1e-5 * np.trace(expected))
    before = {name: gram(plugin.memory[name]["gradients"]) for name in NAMES}
    remove = {name: plugin.projector(name) for name in NAMES}
    strategy.train(second)
    for name in NAMES:  # already projected
        rows = torch.from_numpy(kept[name])[None].float()
        inside = rows - remove[name](rows)
        assert inside.norm() < 0.5 * rows.norm()
        expected = before[name] + kept[name].T @ kept[name]
        np.testing.assert_allclose(gram(plugin.memory[name]["gradients"]), expected, atol=1e-4 * np.trace(expected))
