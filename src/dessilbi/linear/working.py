"""Steps of LBI on the features in play, and what they add up to for all the others."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dessilbi.linear.penalties import Penalty
from dessilbi.linear.problem import Problem

Array = NDArray[Any]


class Columns:
    """By products with the features in play: their columns, or all of X if these are not a small part of it."""

    def __init__(self, problem: Problem, penalty: Penalty, index: Array) -> None:
        self.problem, self.index = problem, index
        self.whole = len(index) == problem.features
        self.penalty = penalty if self.whole else penalty.part(index)
        self._take()

    def _take(self) -> None:
        self.design = self.problem.design if self.whole else self.problem.design.columns(self.index)

    def curve(self, u: Array) -> Array:
        """The product with a bound of the Hessian."""
        loss = self.problem.loss
        return self.design.rmatmul(loss.curvature * loss.weights[:, None] * self.design.matmul(u))

    def run(self, z: Array, b: Array, kappa: float, alpha: float, count: int) -> tuple[Array, Array, Array]:
        """`count` steps: z and the intercepts after each, and sums over the steps from which all others follow."""
        zs = np.empty((count, *z.shape), z.dtype)
        bs = np.empty((count, *b.shape), b.dtype)
        totals, total = self._totals(count, z), None
        for i in range(count):
            gradient, slope, part = self._gradient(kappa * self.penalty.prox(z), b)
            z = z - alpha * gradient
            if self.problem.moves:
                b = b - kappa * alpha * slope
            zs[i], bs[i] = z, b
            if not self.whole:
                total = part if total is None else total + part
                totals[i] = total
        return zs, bs, totals

    def _totals(self, count: int, z: Array) -> Array:
        return np.empty((count, self.problem.design.shape[0], z.shape[1]), z.dtype)

    def _gradient(self, beta: Array, b: Array) -> tuple[Array, Array, Array]:
        r = self.problem.loss.gradient(self.design.matmul(beta) + b)
        return self.design.rmatmul(r), r.sum(0), r

    def others(self, totals: Array, alpha: float) -> Array:
        """How far the steps have moved z of all features, from where it was: for every step."""
        return alpha * self._product(self.problem.design.rmatmul, totals)

    @staticmethod
    def _product(product: Any, totals: Array) -> Array:
        """One product for all steps."""
        count, rows, outputs = totals.shape
        flat = product(np.moveaxis(totals, 0, 1).reshape(rows, count * outputs))
        return np.moveaxis(flat.reshape(len(flat), count, outputs), 1, 0)


class GramColumns(Columns):
    """By the Gram matrix, for the squared loss where there are many more samples than features."""

    def _take(self) -> None:
        gram = self.problem.gram
        assert gram is not None
        self.gram = gram
        self.block = gram if self.whole else gram[np.ix_(self.index, self.index)]
        self.slope = self.problem.slope[self.index]

    def curve(self, u: Array) -> Array:
        product: Array = self.block @ u
        return product

    def _totals(self, count: int, z: Array) -> Array:
        return np.empty((count, *z.shape), z.dtype)

    def _gradient(self, beta: Array, b: Array) -> tuple[Array, Array, Array]:
        return self.slope + self.block @ beta, b, beta

    def others(self, totals: Array, alpha: float) -> Array:
        whole = np.zeros((len(totals), *self.problem.slope.shape), totals.dtype)
        whole[:, self.index] = totals
        count = np.arange(1, len(totals) + 1).astype(totals.dtype)[:, None, None]
        return alpha * (count * self.problem.slope + self._product(self.gram.__matmul__, whole))
