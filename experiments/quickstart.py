"""GPM with BECAME on ten tasks of permuted digits: `python experiments/quickstart.py`."""

import torch
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.supervised import Naive

from became_avalanche import AccuracyMatrix, BecameMergePlugin, GPMPlugin, MultiHeadMLP, permuted_digits

torch.manual_seed(0)
benchmark = permuted_digits()
model = MultiHeadMLP()
accuracy = AccuracyMatrix()
merge = BecameMergePlugin()

strategy = Naive(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    plugins=[GPMPlugin(), merge],
    evaluator=EvaluationPlugin(accuracy, loggers=[]),
    train_mb_size=32,
    train_epochs=15,
    eval_mb_size=128,
)
for experience in benchmark.train_stream:
    strategy.train(experience)
    strategy.eval(benchmark.test_stream)
    print(f"task {experience.current_experience + 1:2}: ACC {accuracy.acc:.1%}, BWT {accuracy.bwt:+.1%}")
print("lambda: " + ", ".join(f"{record.coefficient:.2f}" for record in merge.merges))
