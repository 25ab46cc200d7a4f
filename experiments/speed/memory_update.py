"""Compare updates of the memory with the decompositions that define them.

GPM: the update after the second task of AlexNet with 125 samples, from the inputs of the layers to the new bases. It is
compared with a singular value decomposition of each residual matrix in float64. NSCL: the update of a layer with 4608
inputs, from its covariance to the memory, compared with a singular value decomposition of the covariance.
"""

import numpy as np
import torch
from rows import Row, at_least, cpu_times, images, kind_of_images, ratio
from torch import Tensor

from became_avalanche import AlexNet, PreActResNet18
from became_avalanche.layers.layer import Layer
from became_avalanche.layers.model import map_layers
from became_avalanche.subspace.basis import grow_basis
from became_avalanche.subspace.inputs import InputMatrix, add_inputs


def rows(quick: bool) -> list[Row]:
    return [gpm(repeats=1 if quick else 3), nscl(1152 if quick else 4608)]


def gpm(repeats: int) -> Row:
    """Compare the update of GPM with the decomposition, after a check that both give the same subspace."""
    torch.manual_seed(0)
    model = AlexNet()
    first, second = (inputs_of(model, task, 125) for task in (0, 1))
    bases = {name: update(layer, x, None, 0.97) for name, (layer, x) in first.items()}

    def ours() -> dict[str, Tensor]:
        return {name: update(layer, x, bases[name], 0.973) for name, (layer, x) in second.items()}

    def oracle() -> dict[str, np.ndarray]:
        return {name: by_svd(layer, x, bases[name], 0.973) for name, (layer, x) in second.items()}

    for name, basis in ours().items():
        u, v = basis[0], torch.from_numpy(oracle_basis := by_svd(*second[name], bases[name], 0.973))
        if abs(u.shape[-1] - oracle_basis.shape[-1]) > 1 or (v - u @ (u.mT @ v)).norm(dim=0).mean() > 0.02:
            raise RuntimeError(f"the update of {name} differs from the singular value decomposition")
    seconds = cpu_times({"ours": ours, "oracle": oracle}, repeats)
    note = f"second task, {kind_of_images()}; ours takes {min(seconds['ours']):.2f} s of CPU time"
    return at_least(20, "oracle / memory update, GPM, AlexNet, 125 samples", ratio(seconds, "oracle", "ours"), note)


def inputs_of(model: torch.nn.Module, task: int, samples: int) -> dict[str, tuple[Layer, Tensor]]:
    """Return each layer and its inputs on samples of a task."""
    dataset = images().train_stream[task].dataset.eval()
    x = torch.stack([dataset[i][0] for i in range(samples)])
    seen: dict[str, tuple[Layer, Tensor]] = {}
    layers = {name: layer for name, (layer,) in map_layers(model.features).protected.items()}
    hooks = [
        layer.module.register_forward_pre_hook(
            lambda module, args, name=name, layer=layer: seen.update({name: (layer, args[0])})
        )
        for name, layer in layers.items()
    ]
    with torch.no_grad():
        model.eval().features(x)
    for hook in hooks:
        hook.remove()
    return seen


def update(layer: Layer, x: Tensor, basis: Tensor | None, threshold: float) -> Tensor:
    """Update a basis with the package."""
    matrix = InputMatrix(single=True)
    add_inputs(matrix, layer, x)
    return grow_basis(matrix.empty_basis() if basis is None else basis, matrix, threshold)


def by_svd(layer: Layer, x: Tensor, basis: Tensor, threshold: float) -> np.ndarray:
    """Update a basis as the paper defines it."""
    a = torch.cat([columns[0] for columns in layer.columns(x)], dim=-1).double().numpy()
    u = basis[0].double().numpy()
    residual = a - u @ (u.T @ a)
    vectors, values, _ = np.linalg.svd(residual, full_matrices=False)
    held = 1 - np.sum(residual**2) / np.sum(a**2) + np.concatenate([[0], np.cumsum(values**2)]) / np.sum(a**2)
    return np.column_stack([u, vectors[:, : int(np.sum(held < threshold))]])


def nscl(dimension: int) -> Row:
    """Compare the update of NSCL with a singular value decomposition, for a layer with ``dimension`` inputs."""
    torch.manual_seed(0)
    layers = inputs_of(PreActResNet18(), 0, 320 if dimension == 4608 else 40).values()
    layer, x = next((own, x) for own, x in layers if own.weight[0].numel() == dimension)
    matrix = InputMatrix()
    add_inputs(matrix, layer, x)
    covariance = matrix._gram[0].clone()
    work = {"ours": matrix.compressed, "oracle": lambda: torch.linalg.svd(covariance)}
    seconds = cpu_times(work, 1, warm_up=dimension < 4608)  # with 4608 inputs each takes about a minute
    what = f"SVD of the covariance / memory update, NSCL, {dimension} inputs"
    note = (
        f"{kind_of_images()}; ours takes {min(seconds['ours']):.0f} s of CPU time, nearly all in eigh of LAPACK, in "
        "float64, since eigenvalues of 1e-7 of the largest decide"
    )
    return at_least(5, what, ratio(seconds, "oracle", "ours"), note)
