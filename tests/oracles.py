"""Slow, obvious versions of the computations of the package, written straight from the formulas in float64 numpy.

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
    """Basis after a later task: add singular vectors of the residual until the threshold is reached."""
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


def phi(s, alpha):
    """Importance in SGP and GPCNS, one singular value at a time."""
    return np.array([(alpha + 1) * value / (alpha * value + max(s)) for value in s])


def sgp_later(u, importance, a, threshold, alpha):
    """Basis and importances after a later task. The magnitudes of old vectors come from a second SVD, as published."""
    new = gpm_later(u, a, threshold)
    inside, s, _ = np.linalg.svd(u @ (u.T @ a), full_matrices=False)
    overlap = (u.T @ inside) ** 2
    old_magnitudes = np.sqrt(overlap @ s**2)
    residual = a - u @ (u.T @ a)
    new_magnitudes = np.linalg.svd(residual, compute_uv=False)[: new.shape[1] - u.shape[1]]
    now = phi(np.concatenate([old_magnitudes, new_magnitudes]), alpha)
    return new, np.minimum(1, now + np.concatenate([importance, np.zeros(len(new_magnitudes))]))


def trgp_later(u, a, threshold, slip=False):
    """Protected basis and task subspace after a later task; ``slip`` leaves the strongest new vector unprotected."""
    residual = a - u @ (u.T @ a)
    vectors, s, _ = np.linalg.svd(residual, full_matrices=False)
    energies = [float(v @ a @ a.T @ v) for v in u.T] + list(s**2)
    columns = list(u.T) + list(vectors.T)
    held, chosen = 0.0, []
    for index in sorted(range(len(energies)), key=lambda i: -energies[i]):
        if held >= threshold * np.sum(a**2):
            break
        chosen.append(index)
        held += energies[index]
    first_new = u.shape[1] + (1 if slip else 0)
    protected = [column for index, column in enumerate(columns) if index in chosen and index >= first_new]
    space = np.column_stack([columns[index] for index in sorted(chosen)])
    return np.column_stack([u, *protected]) if protected else u, space


def leading(s, threshold, below):
    """Number of leading singular values that reach the fraction ``threshold`` of their sum, or stay below it."""
    fraction = np.cumsum(s) / np.sum(s)
    k = int(np.sum(fraction < threshold))
    return k if below else min(k + 1, len(s))


def gpcns(gradients, thresholds, alpha, below=False):
    """The matrix N diag(importance) Nᵀ after tasks with ``gradients`` (o, d), from stacked matrices as published."""
    spaces = []
    for t, threshold in enumerate(thresholds):
        _, s, vt = np.linalg.svd(np.vstack(gradients[: t + 1]), full_matrices=False)
        spaces.append(vt[: leading(s, threshold, below)].T)
    vectors, s, _ = np.linalg.svd(np.hstack(spaces), full_matrices=False)
    k = leading(s, thresholds[-1], below) if len(gradients) > 1 else spaces[0].shape[1]
    vectors, s = vectors[:, :k], s[:k]
    return (vectors * phi(s, alpha)) @ vectors.T if k else np.zeros((len(vectors), len(vectors)))


def nscl_null_space(c, a, floor):
    """V₂ V₂ᵀ of the eigenvectors with eigenvalues up to ``a`` times the smallest, which is at least floor x largest."""
    values, vectors = np.linalg.eigh(c)
    values = np.maximum(values, 0)
    null = vectors[:, values <= a * max(values.min(), floor * values.max())]
    return null @ null.T


def owm(columns, alpha):
    """The published recursion of OWM, one input at a time."""
    p = np.eye(len(columns))
    for x in columns.T:
        k = p @ x
        p = p - np.outer(k, k) / (alpha + x @ k)
    return p


def line_objective(weight, delta, fisher, precision):
    """Eq. 11 with Eq. 12: the objective that the coefficient minimises, up to a constant."""
    return 0.5 * (weight - 1) ** 2 * np.sum(fisher * delta**2) + 0.5 * weight**2 * np.sum(precision * delta**2)


def acc(matrix):
    """ACC = 1/T sum_i A[T, i]."""
    tasks = len(matrix)
    return sum(matrix[tasks - 1][i] for i in range(tasks)) / tasks


def bwt(matrix):
    """BWT = 1/(T-1) sum_{i<T} A[T, i] - A[i, i]."""
    tasks = len(matrix)
    return sum(matrix[tasks - 1][i] - matrix[i][i] for i in range(tasks - 1)) / (tasks - 1)
