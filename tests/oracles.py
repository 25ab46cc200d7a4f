"""Slow, obvious versions of what the package computes, written straight from the formulas in float64 numpy.

Nothing here imports the package.
"""

import itertools

import numpy as np


def patches(x, kernel, stride, padding, dilation, groups):
    """Columns (groups, d, n) of a zero-padded convolution input (batch, channels, *space), by explicit loops."""
    axes = len(kernel)
    x = np.pad(x, [(0, 0), (0, 0)] + [(p, p) for p in padding])
    batch, channels = x.shape[:2]
    positions = [range(0, x.shape[2 + a] - dilation[a] * (kernel[a] - 1), stride[a]) for a in range(axes)]
    width = channels // groups
    columns = [[] for _ in range(groups)]
    for group in range(groups):
        for sample in range(batch):
            for position in itertools.product(*positions):
                column = []
                for channel in range(group * width, (group + 1) * width):
                    for offset in itertools.product(*map(range, kernel)):
                        index = [p + o * d for p, o, d in zip(position, offset, dilation, strict=True)]
                        column.append(x[(sample, channel, *index)])
                columns[group].append(column)
    return np.array(columns).transpose(0, 2, 1)


def gpm_first(a, threshold, strictly_below=False):
    """Basis after the first task: SVD of the inputs."""
    u, s, _ = np.linalg.svd(a, full_matrices=False)
    fraction = np.cumsum(s**2) / np.sum(s**2)
    k = int(np.sum(fraction < threshold))
    if not strictly_below and k < len(s):
        k += 1
    if threshold == 0:
        k = 0
    return u[:, :k]


def gpm_later(u, a, threshold):
    """Basis after a later task: the vectors of the residual that the energy still lacks."""
    residual = a - u @ (u.T @ a)
    vectors, s, _ = np.linalg.svd(residual, full_matrices=False)
    total = np.sum(a**2)
    held = 1 - np.sum(residual**2) / total
    new = []
    for k in range(len(s)):
        if held >= threshold:
            break
        new.append(vectors[:, k])
        held += s[k] ** 2 / total
    return np.column_stack([u, *new]) if new else u


def line_objective(weight, delta, fisher, precision):
    """Eq. 11 with Eq. 12: what the coefficient minimises, up to a constant."""
    return 0.5 * (weight - 1) ** 2 * np.sum(fisher * delta**2) + 0.5 * weight**2 * np.sum(precision * delta**2)


def acc(matrix):
    """ACC = 1/T sum_i A[T, i]."""
    tasks = len(matrix)
    return sum(matrix[tasks - 1][i] for i in range(tasks)) / tasks


def bwt(matrix):
    """BWT = 1/(T-1) sum_{i<T} A[T, i] - A[i, i]."""
    tasks = len(matrix)
    return sum(matrix[tasks - 1][i] - matrix[i][i] for i in range(tasks - 1)) / (tasks - 1)
