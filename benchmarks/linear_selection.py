"""Who finds the right features first: `python -m benchmarks.linear_selection [--sets 20] [--json FILE]`.

For every simulated data set the features are ranked by when they enter the path, and the ranking is held against the
true support: the area under its ROC curve, 1 if all true features enter before any other one. Features that never enter
come last, all together. The designs:

    independent     the simulation of Huang, Sun, Xiong and Yao (2018): n = p = 50, coefficients 2 (ten), −2 (five), 0
    correlated      n = 100, p = 50, any two features have the correlation 0.5; coefficients ±2 (fifteen)
    mixtures        n = 200, p = 40; ten true features, thirty that are each nearly the sum of two of those: the
                    irrepresentable condition, without which the lasso errs, does not hold

The noise has deviation 1. The lasso is scikit-learn's `lasso_path` on the same standardised data.
"""

from __future__ import annotations

import argparse
import datetime
import json
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import sklearn
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import lasso_path
from sklearn.metrics import roc_auc_score

from dessilbi.linear import iss_path, lbi_path, split_lbi_path

RELAXATIONS = (1.0, 10.0, 100.0)
"""ν in units of 1/‖∇²L‖."""


def independent(rng: np.random.Generator) -> tuple[Any, Any]:
    beta = np.zeros(50)
    beta[:10], beta[10:15] = 2.0, -2.0
    return rng.standard_normal((50, 50)), beta


def correlated(rng: np.random.Generator) -> tuple[Any, Any]:
    beta = np.zeros(50)
    beta[:15] = 2 * rng.choice([-1.0, 1.0], 15)
    return np.sqrt(0.5) * (rng.standard_normal((100, 50)) + rng.standard_normal((100, 1))), beta


def mixtures(rng: np.random.Generator) -> tuple[Any, Any]:
    x = rng.standard_normal((200, 40))
    for j in range(10, 40):
        first, second = rng.choice(10, 2, replace=False)
        x[:, j] = 0.67 * (x[:, first] + x[:, second]) + np.sqrt(1 - 2 * 0.67**2) * x[:, j]
    return x, np.where(np.arange(40) < 10, 2.0, 0.0)


DESIGNS: dict[str, Callable[[np.random.Generator], tuple[Any, Any]]] = {
    "independent": independent,
    "correlated": correlated,
    "mixtures": mixtures,
}


def lasso(x: Any, y: Any) -> Any:
    """At which penalty each feature enters, as 1/penalty."""
    alphas, coefs, _ = lasso_path(x, y, eps=1e-3)
    return np.where((coefs != 0).any(1), 1 / alphas[(coefs != 0).argmax(1)], np.inf)


def entries(x: Any, y: Any) -> dict[str, Any]:
    """When each feature enters, method by method."""
    lip = np.linalg.norm(x, 2) ** 2 / len(x)
    path = lbi_path(x, y, n_times=2)
    found = {
        "lasso_path": lasso(x, y),
        "iss_path": iss_path(x, y).entries,
        "lbi_path": path.entries,
        "lbi_path, κ 10 times its default": lbi_path(x, y, kappa=10 * path.kappa, n_times=2).entries,
    }
    for relaxation in RELAXATIONS:
        name = f"split_lbi_path, ν = {relaxation:g}/‖∇²L‖{' (its default)' if relaxation == 10 else ''}"
        found[name] = split_lbi_path(x, y, nu=relaxation / lip, n_times=2).entries
    return found


def auc(when: Any, beta: Any) -> float:
    """The area under the ROC curve of the ranking by entry time."""
    return float(roc_auc_score(beta != 0, -np.minimum(when, np.finfo(float).max)))


def irrepresentable(x: Any, beta: Any) -> float:
    """‖X_Nᵀ X_S (X_Sᵀ X_S)⁻¹ sign(β_S)‖∞: the lasso's selection is consistent only where this is below 1."""
    s = beta != 0
    return float(np.abs(x[:, ~s].T @ x[:, s] @ np.linalg.solve(x[:, s].T @ x[:, s], np.sign(beta[s]))).max())


def simulate(name: str, sets: int) -> dict[str, Any]:
    """The AUC of every method on every data set of a design."""
    scores: dict[str, list[float]] = {}
    condition = []
    for seed in range(sets):
        rng = np.random.default_rng(seed)
        x, beta = DESIGNS[name](rng)
        y = x @ beta + rng.standard_normal(len(x))
        x = (x - x.mean(0)) / x.std(0)
        y = y - y.mean()
        condition.append(irrepresentable(x, beta))
        for method, when in entries(x, y).items():
            scores.setdefault(method, []).append(auc(when, beta))
    return {"irrepresentable": condition, "auc": scores}


def table(results: dict[str, Any]) -> str:
    """Means over data sets, ± the standard error; the best of a design is starred."""
    methods = list(next(iter(results.values()))["auc"])
    lines = ["| | " + " | ".join(results) + " |", "|---|" + "---|" * len(results)]
    best = {name: max(np.mean(r["auc"][m]) for m in methods) for name, r in results.items()}
    for method in methods:
        cells = []
        for name, result in results.items():
            values = np.array(result["auc"][method])
            star = "*" if values.mean() == best[name] else ""
            cells.append(f"{values.mean():.4f} ± {values.std(ddof=1) / np.sqrt(len(values)):.4f}{star}")
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    shown = " | ".join(f"{np.median(r['irrepresentable']):.2f}" for r in results.values())
    lines.append(f"| *irrepresentable condition: < 1 if it holds (median)* | {shown} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sets", type=int, default=20, help="data sets a design, at least 2")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    arguments = parser.parse_args()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # of lasso_path, at penalties of nearly nothing
        results = {name: simulate(name, arguments.sets) for name in DESIGNS}
    print(f"AUC over {arguments.sets} data sets, scikit-learn {sklearn.__version__}, {datetime.date.today()}")
    print(table(results))
    if arguments.json:
        head = {"date": str(datetime.date.today()), "scikit-learn": sklearn.__version__, "sets": arguments.sets}
        with open(arguments.json, "w", encoding="utf-8") as out:
            json.dump({**head, "designs": results}, out, indent=1, ensure_ascii=False)


if __name__ == "__main__":
    main()
