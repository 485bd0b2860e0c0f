"""Small regression and classification data."""

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np


def regression(n=40, p=12, seed=0, noise=0.5, offset=True):
    """X, y with 4 coefficients of different sizes; features of different means and deviations."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, p))
    if offset:
        x = x * rng.uniform(0.5, 2.0, p) + rng.standard_normal(p)
    beta = np.zeros(p)
    beta[:4] = 3.0, -2.0, 1.5, 1.0
    return x, x @ beta + noise * rng.standard_normal(n) + 2.0 * offset


def classes(n=60, p=8, count=3, seed=0):
    """X and labels 0 … count − 1 that depend on the first features; every label occurs."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, p)) + rng.standard_normal(p)
    eta = np.zeros((n, count))
    for k in range(count):
        eta[:, k] = 2 * x[:, k] + k / 2
    return x, (eta + rng.gumbel(size=eta.shape)).argmax(1)


def peak(work: Callable[[], Any]) -> int:
    """The most memory in bytes that some work has allocated at a time."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
