"""What a path costs beside scikit-learn's: `python -m benchmarks.linear_paths [--rounds 7] [--json FILE]`.

`lbi_path` and `lasso_path` run in turns on the same data, in one process: 100 times, or penalties, over two decades
from the first entry on. `lasso_path` expects centred data: beside it stands the same with the centring, which
`lbi_path` does inside its products. A figure is the median over rounds; a ratio is the median of the rounds' ratios.
Then the most memory that a call allocates at a time, as a share of X.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
import tracemalloc
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import sklearn
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import lasso_path

from dessilbi.linear import iss_path, lbi_path, split_lbi_path

GOALS = {(500, 10_000): 3.0, (10_000, 1_000): 2.0}


def data(n: int, p: int, dtype: Any) -> tuple[Any, Any]:
    """Independent features, twenty coefficients of ±1 and more, noise of deviation 1."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, p)).astype(dtype)
    beta = rng.standard_normal(20)
    return x, (x[:, :20] @ (beta + np.sign(beta)) + rng.standard_normal(n)).astype(dtype)


def contenders(x: Any, y: Any) -> dict[str, Callable[[], Any]]:
    centred, target = np.asfortranarray(x - x.mean(0)), y - y.mean()
    return {
        "lasso_path": lambda: lasso_path(centred, target, eps=1e-2),
        "lasso_path and centring": lambda: lasso_path(np.asfortranarray(x - x.mean(0)), y - y.mean(), eps=1e-2),
        "lbi_path": lambda: lbi_path(x, y, n_times=100, eps=1e-2),
    }


def measure(n: int, p: int, dtype: Any, rounds: int) -> dict[str, Any]:
    x, y = data(n, p, dtype)
    works = contenders(x, y)
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - start)
    control = seconds["lasso_path"]
    path = lbi_path(x, y)
    return {
        "n": n,
        "p": p,
        "dtype": np.dtype(dtype).name,
        "goal": GOALS[n, p],
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "ratio": {name: statistics.median(a / b for a, b in zip(values, control, strict=True))
                  for name, values in seconds.items()},
        "steps": path.n_iter,
        "entered": len(path.order),
        "memory": {
            "lbi_path": peak(lambda: lbi_path(x, y)) / x.nbytes,
            "lbi_path, 5 times": peak(lambda: lbi_path(x, y, n_times=5)) / x.nbytes,
            "split_lbi_path, 5 times": peak(lambda: split_lbi_path(x, y, n_times=5, max_iter=20)) / x.nbytes,
        },
    }  # fmt: skip


def others() -> dict[str, float]:
    """Seconds of what has no counterpart in scikit-learn, once each, to 100 times the first entry."""
    tall, wide = data(10_000, 1_000, np.float64), data(500, 10_000, np.float64)
    works: dict[str, Callable[[], Any]] = {
        "split_lbi_path, n=10000, p=1000": lambda: split_lbi_path(*tall),
        "split_lbi_path, n=10000, p=1000, D=difference": lambda: split_lbi_path(*tall, D="difference"),
        "iss_path, n=10000, p=1000": lambda: iss_path(*tall, max_time=end(*tall)),
        "iss_path, n=500, p=10000": lambda: iss_path(*wide, max_time=end(*wide)),
    }
    seconds = {}
    for name, work in works.items():
        start = time.perf_counter()
        work()
        seconds[name] = time.perf_counter() - start
    return seconds


def end(x: Any, y: Any) -> float:
    """100 times the first entry."""
    return float(lbi_path(x, y, n_times=1).times[0])


def peak(work: Callable[[], Any]) -> int:
    """The most memory in bytes that some work has allocated at a time."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| n | p | | lasso_path | with centring | lbi_path | ratio | goal | steps | memory / X (5 times) |"]
    lines.append("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        a, b, c = row["seconds"].values()
        memory = row["memory"]
        lines.append(
            f"| {row['n']} | {row['p']} | {row['dtype']} | {a:.2f} s | {b:.2f} s | {c:.2f} s | "
            f"{row['ratio']['lbi_path']:.2f} | {row['goal']:g} | {row['steps']} | "
            f"{memory['lbi_path']:.2f} ({memory['lbi_path, 5 times']:.2f}) |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--without-others", action="store_true", help="only what scikit-learn has, too")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    arguments = parser.parse_args()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # of Split LBI's 20 steps for its memory
        rows = [measure(n, p, dtype, arguments.rounds) for n, p in GOALS for dtype in (np.float64, np.float32)]
        rest = {} if arguments.without_others else others()
    machine = f"{platform.machine()}, NumPy {np.__version__}, scikit-learn {sklearn.__version__}"
    print(f"{machine}, {arguments.rounds} rounds, {datetime.date.today()}")
    print(table(rows))
    for name, seconds in rest.items():
        print(f"{name}: {seconds:.2f} s")
    if arguments.json:
        head = {"date": str(datetime.date.today()), "machine": machine, "rounds": arguments.rounds}
        with open(arguments.json, "w", encoding="utf-8") as out:
            json.dump({**head, "paths": rows, "others": rest}, out, indent=1, ensure_ascii=False)


if __name__ == "__main__":
    main()
