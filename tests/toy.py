"""Small tensors with known gradients, so that tests of the optimizers are instant and need no network."""

import numpy as np
import torch

from dessilbi import Labels, transposed_filters
from tests.oracles import iteration as oracle

CHECKERBOARD = torch.arange(4 * 3 * 2).view(4, 3, 2) % 5

# name: (shape, group, the oracle's index)
GROUPS = {
    "weight": ((5, 4), "weight", oracle.group_index((5, 4), "weight")),
    "filter1d": ((4, 3, 3), "filter", oracle.group_index((4, 3, 3), "filter")),
    "filter2d": ((4, 3, 2, 2), "filter", oracle.group_index((4, 3, 2, 2), "filter")),
    "filter3d": ((3, 2, 2, 2, 2), "filter", oracle.group_index((3, 2, 2, 2, 2), "filter")),
    "transposed": (
        (4, 3, 2, 2),
        transposed_filters(1),
        oracle.group_index((4, 3, 2, 2), "filter", transposed=True),
    ),
    "transposed grouped": (
        (4, 3, 2),
        transposed_filters(2),
        oracle.group_index((4, 3, 2), "filter", transposed=True, conv_groups=2),
    ),
    "neuron": ((5, 4), "neuron", oracle.group_index((5, 4), "neuron")),
    "input": ((5, 4), "input", oracle.group_index((5, 4), "input")),
    "layer": ((3, 2, 2), "layer", oracle.group_index((3, 2, 2), "layer")),
    "labels": ((4, 3, 2), Labels(CHECKERBOARD), CHECKERBOARD.numpy()),
    "single": ((1, 1), "neuron", oracle.group_index((1, 1), "neuron")),
    "none": ((6,), None, None),
}

VARIANTS = {
    "naive": {},
    "momentum": {"momentum": 0.9},
    "dampened": {"momentum": 0.8, "dampening": 0.3},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "decay": {"momentum": 0.9, "weight_decay": 0.05},
    "decoupled": {"momentum": 0.9, "weight_decay": 0.01, "decoupled_weight_decay": True},
    "maximize": {"momentum": 0.5, "weight_decay": 0.05, "maximize": True},
}


def start(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Initial weights; one element is exactly zero, and so is the first slice of larger tensors."""
    w = np.random.default_rng(seed).standard_normal(shape)
    w.flat[-1] = 0.0
    if shape[0] > 2:
        w[0] = 0.0
    return w.astype(np.float32)


def gradient(w: np.ndarray, step: int) -> np.ndarray:
    """That of a badly scaled quadratic with a minimum away from zero, plus noise that depends on the step alone."""
    rng = np.random.default_rng(1000 + step)
    target = np.linspace(-2, 2, w.size).reshape(w.shape)
    curvature = np.linspace(0.2, 1.0, w.size).reshape(w.shape)
    return (curvature * (w - target) + 0.1 * rng.standard_normal(w.shape)).astype(np.float32)
