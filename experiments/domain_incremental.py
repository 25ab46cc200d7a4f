"""GPM with BECAME on a domain-incremental stream with one head: `python experiments/domain_incremental.py`."""

import warnings

import torch
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.supervised import Naive

from became_avalanche import AccuracyMatrix, BecameMergePlugin, GPMPlugin, SingleHeadMLP, domain_digits

warnings.filterwarnings("ignore", message="No loggers specified")
torch.manual_seed(0)
benchmark, model, accuracy = domain_digits(), SingleHeadMLP(n_classes=10), AccuracyMatrix()

strategy = Naive(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.2),
    plugins=[GPMPlugin(), BecameMergePlugin()],
    evaluator=EvaluationPlugin(accuracy),
    train_mb_size=16,
    train_epochs=5,
    eval_mb_size=128,
)
for experience in benchmark.train_stream:
    t = experience.current_experience
    strategy.train(experience)
    strategy.eval(benchmark.test_stream[: t + 1])
    print(f"after domain {t + 1}: ACC {accuracy.acc:.1%}" + (f", BWT {accuracy.bwt:+.1%}" if t else ""))
