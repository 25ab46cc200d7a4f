"""Avalanche 0.6.0: benchmark_with_validation_stream drops the task labels of the experiences."""

import torch
from avalanche.benchmarks import benchmark_with_validation_stream, nc_benchmark
from torch.utils.data import TensorDataset

data = TensorDataset(torch.randn(40, 4), torch.arange(40) % 4)
data.targets = data.tensors[1].tolist()
benchmark = nc_benchmark(data, data, n_experiences=2, task_labels=True)
print("before:", benchmark.train_stream[1].task_labels)
split = benchmark_with_validation_stream(benchmark, validation_size=0.25)
try:
    print("after:", split.train_stream[1].task_labels)
except AttributeError as error:
    print(f"after: AttributeError: {error}")
    print("fault shown")
else:
    print("no fault")

# Fix, where the new experiences are made: copy the labels of the data set.
#     experience.task_labels = list(experience.dataset.targets_task_labels.uniques)
