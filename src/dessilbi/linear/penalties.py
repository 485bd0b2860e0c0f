"""What is sparse: single coefficients (l1), or groups of rows over all outputs. Proximal maps with threshold 1."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

Array = NDArray[Any]


class Penalty:
    """Ω(γ) = Σ|γ_jk|. Arrays are … × rows × outputs; a unit is what enters the path at once: here a single number."""

    def norms(self, z: Array) -> Array:
        """The norm of every unit."""
        norms: Array = np.abs(z)
        return norms

    def prox(self, z: Array) -> Array:
        """z shrunk by 1."""
        shrunk: Array = z - np.clip(z, -1, 1)
        return shrunk

    def rows(self, units: Array) -> Array:
        """The rows that a mask of units touches, as a mask."""
        touched: Array = np.asarray(units.any(-1))
        return touched

    def part(self, index: Array) -> Penalty:
        """The penalty of some rows, which hold their groups whole."""
        return self


class Group(Penalty):
    """Ω(γ) = Σ_g ‖γ_g‖₂; a unit is a group of rows, over all outputs.

    Args:
        labels: the group of every row: whole numbers from 0, none left out.
    """

    def __init__(self, labels: Array) -> None:
        self.labels = labels
        ones = np.ones(len(labels))
        self._members = sparse.csr_array((ones, (labels, np.arange(len(labels)))))

    def norms(self, z: Array) -> Array:
        squares = (z * z).sum(-1)
        if squares.ndim == 1:
            return np.asarray(np.sqrt(self._members @ squares), dtype=z.dtype)
        return np.asarray(np.sqrt(self._members @ squares.T).T, dtype=z.dtype)

    def prox(self, z: Array) -> Array:
        norms = self.norms(z)
        factor = np.maximum(0, norms - 1) / np.maximum(norms, 1)
        result: Array = factor[..., self.labels, None] * z
        return result

    def rows(self, units: Array) -> Array:
        touched: Array = units[..., self.labels]
        return touched

    def part(self, index: Array) -> Penalty:
        return Group(np.unique(self.labels[index], return_inverse=True)[1])


def penalty(kind: str, rows: int, outputs: int, groups: Any = None) -> Penalty:
    """The penalty by its name, checked against the number of rows."""
    if kind not in ("l1", "group"):
        raise ValueError(f"penalty must be 'l1' or 'group', got {kind!r}")
    if kind == "l1":
        if groups is not None:
            raise ValueError("groups are given, but penalty='l1' has none: set penalty='group', or groups=None")
        return Penalty()
    if groups is None:
        if outputs == 1:
            raise ValueError("penalty='group' with one output needs groups: a label for every row that is penalised")
        return Group(np.arange(rows))
    labels = np.asarray(groups)
    if labels.shape != (rows,):
        raise ValueError(f"groups must have one label for each of {rows} penalised rows, got shape {labels.shape}")
    return Group(np.unique(labels, return_inverse=True)[1])
