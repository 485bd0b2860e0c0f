"""The appendix's figures, by the example's own functions."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

FILE = Path(__file__).parents[2] / "examples" / "split_lbi.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("split_lbi_example", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_simulation_is_near_the_edge_of_both_step_sizes(example: ModuleType) -> None:
    x, _, beta = example.simulate()
    hessian = x.T @ x / len(x)
    assert np.count_nonzero(beta) == 30
    assert np.abs(beta[:30]).min() >= 1
    for nu, step, stable in ((30.0, 0.5, True), (100.0, 0.515, False), (100.0, 0.05, True)):
        one = np.eye(len(beta)) / nu
        top = np.linalg.eigvalsh(np.block([[hessian + one, -one], [-one, one]]))[-1]
        assert (step < 2 / top) == stable


def test_a_small_step_is_stable_and_a_large_one_oscillates(example: ModuleType) -> None:
    small, large = example.step_size()
    assert (np.diff(small.losses) < 0).all()
    assert small.warning is None
    assert "alpha=0.515 is not below 0.509" in large.warning
    assert large.losses[-1] > 1e3 * large.losses[0]
    # In the end γ swings from side to side in nearly every step.
    moves = np.diff(large.gammas[-50:], axis=0)
    moving = np.abs(moves).max(0) > 1e-3
    turns = moves[1:, moving] * moves[:-1, moving] < 0
    assert turns.mean() > 0.8
    calm = np.diff(small.gammas[-50:], axis=0)
    assert (calm[1:] * calm[:-1] < 0).mean() < 0.05


def test_large_damping_is_nearer_to_the_piecewise_constant_limit(example: ModuleType) -> None:
    """κ = 100: what enters jumps to where it stays; κ = 1: it grows slowly."""
    slow, quick = example.damping(end=150.0)
    for t in np.linspace(40, 150, 12):
        row = [each.gammas[np.searchsorted(each.times, t) - 1] for each in (slow, quick)]
        assert np.abs(row[1]).sum() > np.abs(row[0]).sum()
    first = int(np.argmax(np.abs(quick.gammas[-1])))
    rise = []
    for each in (slow, quick):
        path = np.abs(each.gammas[:, first])
        rise.append(each.times[(path > 0.8 * path[-1]).argmax()] - each.times[(path > 0).argmax()])
    assert rise[1] < 0.2 * rise[0]


def test_the_figures_are_drawn(example: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    example.draw(example.step_size(end=20.0), tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").stat().st_size > 10_000
