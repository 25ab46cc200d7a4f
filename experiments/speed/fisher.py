"""Compare the time of Fisher estimators with one epoch of training: AlexNet, batches of 64 random images, one thread.

    python experiments/speed/fisher.py

Prints for each estimator its time divided by the time of a training epoch over the same images (median over
interleaved repeats), and its peak memory beyond that of training.
"""

import argparse
from statistics import median
from time import perf_counter

import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from became_avalanche import AlexNet, Fisher
from became_avalanche.merging.fisher import ESTIMATORS, Batch
from became_avalanche.merging.persample import BUDGET

CLASSES = 10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AlexNet(running_statistics=True)
    head = torch.nn.Linear(2048, CLASSES)
    network = torch.nn.Sequential(model.features, head)
    batches = [(torch.randn(64, 3, 32, 32), torch.randint(CLASSES, (64,))) for _ in range(arguments.batches)]
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)

    def epoch() -> None:
        network.train()
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(network(x), y).backward()
            optimizer.step()

    def passes():
        for x, y in batches:
            logits = network(x)
            yield Batch(F.cross_entropy(logits, y), logits, y)

    def estimate(name: str) -> None:
        network.eval()
        Fisher(name)(passes(), network, dict(network.named_parameters()))

    work = {"training": epoch, **{name: lambda name=name: estimate(name) for name in ESTIMATORS}}
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(arguments.repeats):
        for name, run in work.items():
            start = perf_counter()
            run()
            seconds[name].append(perf_counter() - start)
    for name in ESTIMATORS:
        ratios = [own / epoch for own, epoch in zip(seconds[name], seconds["training"], strict=True)]
        print(f"{name:15} {median(ratios):5.2f} epochs, {peak(work[name]) - peak(epoch):+6.0f} MiB over training")
    print(f"budget of per-sample gradients: {BUDGET * 4 / 2**20:.0f} MiB")


def peak(run) -> float:
    """Return the peak memory of tensors during a call, in MiB."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    held = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most / 2**20


if __name__ == "__main__":
    main()
