"""The Lyapunov function of SPEC.md section 5 in plain float64 NumPy, by its definition."""

import math

import numpy as np

from .iteration import members, norms


def omega(gamma, index, lam, size_normalised=False):
    """Ω(Γ) = λ Σ_g ‖Γ_g‖; with `size_normalised` every group's λ times √|g|."""
    sizes = np.array([len(positions) for positions in members(index)])
    weights = lam * np.sqrt(sizes) if size_normalised else lam * np.ones(len(sizes))
    return float((weights * norms(gamma, index)).sum())


class Lyapunov:
    """F_k of a list of `Oracle`s that share α and κ; tensors without groups only move."""

    def __init__(self, oracles):
        self.oracles = oracles
        self.before = None

    def __call__(self, loss):
        """(F, ‖P − P'‖²) with the loss at the present weights; the second is None at the first call."""
        alpha, kappa = self.oracles[0].lr, self.oracles[0].kappa
        total, distance, moved = float(loss), 0.0, 0.0
        now = []
        for place, o in enumerate(self.oracles):
            gamma = o.gamma()
            total += o.weight_decay / 2 * float((o.W**2).sum())
            if o.index is not None and not math.isinf(o.nu):
                total += float(((o.W - gamma) ** 2).sum()) / (2 * o.nu)
            now.append((o.W.copy(), gamma, o.V - gamma / kappa))
            if self.before is None:
                continue
            w, g, p = self.before[place]
            moved += float(((o.W - w) ** 2).sum() + ((gamma - g) ** 2).sum())
            if o.index is not None:
                a, b = (omega(x, o.index, o.lam, o.size_normalised) for x in (gamma, g))
                distance += a - b - float((p * (gamma - g)).sum())
        first = self.before is None
        self.before = now
        return alpha * total + distance, None if first else moved
