"""The benchmark of selection, in small: mixtures of features that the lasso mistakes for the features themselves."""

import numpy as np
import pytest
from benchmarks.linear_selection import auc, irrepresentable, lasso, mixtures, table
from sklearn.metrics import roc_auc_score

from dessilbi.linear import iss_path, split_lbi_path


def test_the_area_under_the_curve_by_hand() -> None:
    beta = np.array([1.0, 1.0, 0.0, 0.0])
    assert auc(np.array([0.1, 0.2, 0.3, np.inf]), beta) == 1.0
    # Of the four pairs of a true and a wrong one, one is the wrong way round and one a tie.
    assert auc(np.array([0.1, np.inf, 0.3, np.inf]), beta) == pytest.approx(2.5 / 4)


def test_split_lbi_at_larger_nu_ranks_what_the_lasso_mistakes() -> None:
    scores = []
    for seed in range(2):
        rng = np.random.default_rng(100 + seed)
        x, beta = mixtures(rng)
        y = x @ beta + rng.standard_normal(len(x))
        x, y = (x - x.mean(0)) / x.std(0), y - y.mean()
        assert irrepresentable(x, beta) > 1
        lip = np.linalg.norm(x, 2) ** 2 / len(x)
        ways = lasso(x, y), iss_path(x, y).entries, *(split_lbi_path(x, y, nu=nu / lip, n_times=2).entries
                                                      for nu in (1.0, 100.0))  # fmt: skip
        scores.append([auc(when, beta) for when in ways])
        assert scores[-1][0] == pytest.approx(roc_auc_score(beta != 0, 1 / lasso(x, y)))
    of_lasso, of_iss, near, far = np.mean(scores, 0)
    assert max(of_lasso, of_iss, near) < 0.4
    assert far > 0.85


def test_the_table_stars_the_best() -> None:
    text = table({"a": {"irrepresentable": [1.5, 2.5], "auc": {"one": [0.5, 0.7], "two": [0.9, 0.9]}}})
    assert "| one | 0.6000 ± 0.1000 |" in text
    assert "| two | 0.9000 ± 0.0000* |" in text
    assert text.endswith("| 2.00 |")
