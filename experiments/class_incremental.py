"""GPM on a class-incremental stream with a growing head: `python experiments/class_incremental.py`."""

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
    t = experience.current_experience
    strategy.train(experience)
    strategy.eval(benchmark.test_stream[: t + 1])
    if t == 0:
        before = deepcopy(model)
    print(f"after {2 * t + 2:2} classes: ACC {accuracy.acc:.1%}" + (f", BWT {accuracy.bwt:+.1%}" if t else ""))
print("relative change of layer outputs on the first two classes since they were learned:")
for layer, moved in measure_drift(before, model, benchmark.train_stream[0]).items():
    print(f"{layer:21} {moved:.1%}")
