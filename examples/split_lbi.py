"""The appendix's two figures of Split LBI: `python examples/split_lbi.py [--out FOLDER]`.

The simulation is that of Osher, Ruan, Xiong, Yao and Yin (2016): y = Xβ + ε, 30 of 100 coefficients are not zero, noise
of deviation 1, any two features have the correlation 1/(3p); D is the identity. The first figure shows the damping:
κ = 1 (α = 0.1) and κ = 100 (α = 0.005) at ν = 30. The second one the step size: α = 0.05 and 0.515 at κ = 1, ν = 100.

The paper does not give the data, but its step sizes are near the edge: κα = 0.5 is stable (ν = 30) and 0.515 is not
(ν = 100), so that ‖XᵀX‖/n lies between 3.87 and 3.97. A hundred samples have about that; X is scaled to 3.92.
"""

from __future__ import annotations

import argparse
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from dessilbi.linear import split_lbi_path

SAMPLES, FEATURES, TRUE = 100, 100, 30
NORM = 3.92


def simulate(seed: int = 0) -> tuple[Any, Any, Any]:
    """X, y and the coefficients."""
    rng = np.random.default_rng(seed)
    covariance = np.full((FEATURES, FEATURES), 1 / (3 * FEATURES))
    np.fill_diagonal(covariance, 1.0)
    x = rng.multivariate_normal(np.zeros(FEATURES), covariance, SAMPLES)
    x *= np.sqrt(NORM * SAMPLES) / np.linalg.norm(x, 2)
    beta = np.zeros(FEATURES)
    beta[:TRUE] = rng.standard_normal(TRUE)
    beta[:TRUE] += np.sign(beta[:TRUE])
    return x, x @ beta + rng.standard_normal(SAMPLES), beta


@dataclass(frozen=True)
class Run:
    """A run step by step: path times, the loss l(β, γ) and γ there, and what the library said about the step size."""

    kappa: float
    alpha: float
    nu: float
    times: Any
    losses: Any
    gammas: Any
    warning: str | None


def run(x: Any, y: Any, *, kappa: float, alpha: float, nu: float, end: float) -> Run:
    """Split LBI without intercept and standardisation, seen at every step (at most at 2000 of them)."""
    steps = round(end / alpha)
    times = alpha * np.unique(np.linspace(1, steps, min(steps, 2000)).astype(int))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        path = split_lbi_path(
            x, y, kappa=kappa, alpha=alpha, nu=nu, times=times, fit_intercept=False, standardize=False
        )
    assert path.dense_coefs is not None
    assert path.gammas is not None
    residuals = y - path.dense_coefs @ x.T
    gaps = path.dense_coefs - path.gammas
    losses = (residuals**2).sum(1) / (2 * len(y)) + (gaps**2).sum(1) / (2 * nu)
    return Run(kappa, alpha, nu, times, losses, path.gammas, str(caught[0].message) if caught else None)


def damping(end: float = 400.0) -> list[Run]:
    """κ = 1 and 100 at ν = 30."""
    x, y, _ = simulate()
    return [run(x, y, kappa=1.0, alpha=0.1, nu=30.0, end=end), run(x, y, kappa=100.0, alpha=0.005, nu=30.0, end=end)]


def step_size(end: float = 250.0) -> list[Run]:
    """α = 0.05 and 0.515 at κ = 1, ν = 100."""
    x, y, _ = simulate()
    return [run(x, y, kappa=1.0, alpha=alpha, nu=100.0, end=end) for alpha in (0.05, 0.515)]


def draw(runs: list[Run], file: Path) -> None:
    """The loss and the path of γ of each run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(runs), 6), layout="constrained")
    for column, each in zip(figure.subplots(2, len(runs), squeeze=False).T, runs, strict=True):
        column[0].set_title(f"κ = {each.kappa:g}, α = {each.alpha:g}, ν = {each.nu:g}")
        column[0].semilogy(each.times, each.losses)
        column[0].set_ylabel("loss l(β, γ)")
        truth = np.arange(FEATURES) < TRUE
        column[1].plot(each.times, each.gammas[:, ~truth], color="0.75", linewidth=0.8)
        column[1].plot(each.times, each.gammas[:, truth], linewidth=0.8)
        column[1].set_ylabel("γ (grey: truly zero)")
        column[1].set_xlabel("t")
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path(), help="the folder that the figures go to")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    for name, runs in (("split_lbi_kappa.svg", damping()), ("split_lbi_alpha.svg", step_size())):
        draw(runs, folder / name)
        print(folder / name)
        for each in runs:
            rises = int((np.diff(each.losses) > 0).sum())
            print(
                f"  κ={each.kappa:g} α={each.alpha:g} ν={each.nu:g}: the loss goes from {each.losses[0]:.3g} to "
                f"{each.losses[-1]:.3g} and rises from {rises} of {len(each.losses) - 1} points to the next"
            )
            if each.warning:
                print(f"  {each.warning}")


if __name__ == "__main__":
    main()
