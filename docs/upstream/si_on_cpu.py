"""Avalanche 0.6.0: Synaptic Intelligence does nothing on the CPU.

``extract_weights`` stores ``param.detach().cpu().flatten()``. On the CPU that is a view of the live weight, so the
weights "before" a step change with the step, and their difference is always zero.
"""

import torch
from avalanche.benchmarks import nc_benchmark
from avalanche.models import SimpleMLP
from avalanche.training.plugins import SynapticIntelligencePlugin
from avalanche.training.supervised import Naive
from torch.utils.data import TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.arange(64) % 4)
data.targets = data.tensors[1].tolist()
benchmark = nc_benchmark(data, data, n_experiences=2, task_labels=False)
plugin = SynapticIntelligencePlugin(si_lambda=1.0)
model = SimpleMLP(num_classes=4, input_size=8)
strategy = Naive(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), plugins=[plugin], evaluator=None)
strategy.train(benchmark.train_stream[0])

largest = max(float(value.data.abs().max()) for value in plugin.syn_data["trajectory"].values())
print(f"largest importance collected along the trajectory: {largest}")
print("fault shown" if largest == 0 else "no fault")

# Fix, in SynapticIntelligencePlugin.extract_weights:
#     target[name].data = param.detach().clone().cpu().flatten()
