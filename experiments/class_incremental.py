"""GPM on a stream of new classes with a head that grows: `python experiments/class_incremental.py`."""

import warnings
from copy import deepcopy

import torch
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.supervised import Naive

from became_avalanche import AccuracyMatrix, GPMPlugin, SingleHeadMLP, class_digits, measure_drift

warnings.filterwarnings("ignore", message="No loggers specified")
torch.manual_seed(0)
benchmark, model, accuracy = class_digits(), SingleHeadMLP(), AccuracyMatrix()

strategy = Naive(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    plugins=[GPMPlugin(threshold=0.99)],
    evaluator=EvaluationPlugin(accuracy),
    train_mb_size=16,
    train_epochs=5,
    eval_mb_size=128,
)
for experience in benchmark.train_stream:
    strategy.train(experience)
    strategy.eval(benchmark.test_stream[: experience.current_experience + 1])
    if experience.current_experience == 0:
        before = deepcopy(model)
    print(f"after {2 * experience.current_experience + 2:2} classes: ACC {accuracy.acc:.1%}, BWT {accuracy.bwt:+.1%}")
print(f"outputs of the first two classes moved: {measure_drift(before, model, benchmark.train_stream[0])}")
