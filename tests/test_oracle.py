"""Every variant × group kind, 50 steps, against the independent float64 oracle."""

import numpy as np
import pytest
import torch

from dessilbi import DessiAdamW, DessiLBI
from tests.oracles.iteration import AdamWOracle, Oracle
from tests.toy import GROUPS, VARIANTS, gradient, start

STEPS = 50
COUPLING = {"lr": 0.05, "kappa": 1.5, "nu": 2.0, "lam": 0.213}


def follow(optimizer, oracle, p, *, check_every=10):
    """Give both the same gradients, those at the oracle's weights; compare all they hold."""
    for k in range(STEPS):
        g = gradient(oracle.W, k)
        p.grad = torch.from_numpy(g)
        if k == 20:  # λ and the step size may change between steps
            oracle.lam = optimizer.lam = 0.357
            oracle.lr = optimizer.param_groups[0]["lr"] = 0.03
        optimizer.step()
        oracle.step(g.astype(np.float64))
        if k % check_every == check_every - 1:
            close(p.detach(), oracle.W)
            if oracle.index is not None:
                close(optimizer.dual(p), oracle.V)
                # Γ is what is left of κεV above the threshold: its rounding error is relative to κεV, not to the rest.
                close(optimizer.gamma(p), oracle.gamma(), size=oracle.kappa * np.abs(oracle.epsilon * oracle.V).max())
                on = np.zeros(oracle.index.max() + 1, dtype=bool)
                on[oracle.index[oracle.gamma() != 0]] = True
                assert (optimizer.support(p).flatten().numpy() == on).all()


def close(actual, expected, size=None):
    error = np.abs(actual.double().numpy() - expected).max() / max(
        np.abs(expected).max() if size is None else size, 1e-3
    )
    assert error <= 1e-5


@pytest.mark.parametrize("scaling", [False, True], ids=["", "scaling"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", GROUPS)
def test_dessilbi(kind, variant, scaling):
    shape, group, index = GROUPS[kind]
    w, options = start(shape), {**COUPLING, **VARIANTS[variant], "scaling": scaling}
    p = torch.nn.Parameter(torch.from_numpy(w.copy()))
    follow(DessiLBI([{"params": [p], "group": group}], **options), Oracle(w, index, **options), p)


@pytest.mark.parametrize("scaling", [False, True], ids=["", "scaling"])
@pytest.mark.parametrize("maximize", [False, True], ids=["", "maximize"])
@pytest.mark.parametrize("kind", GROUPS)
def test_dessiadamw(kind, maximize, scaling):
    shape, group, index = GROUPS[kind]
    w, options = start(shape), {**COUPLING, "maximize": maximize, "scaling": scaling}
    p = torch.nn.Parameter(torch.from_numpy(w.copy()))
    follow(DessiAdamW([{"params": [p], "group": group}], **options), AdamWOracle(w, index, **options), p)


@pytest.mark.parametrize("kind", GROUPS)
def test_size_normalised(kind):
    shape, group, index = GROUPS[kind]
    w, options = start(shape), {**COUPLING, "momentum": 0.9, "lam": 0.1}
    p = torch.nn.Parameter(torch.from_numpy(w.copy()))
    groups = [{"params": [p], "group": group, "size_normalised": True}]
    follow(DessiLBI(groups, **options), Oracle(w, index, size_normalised=True, **options), p)


@pytest.mark.parametrize("kind", ["filter2d", "transposed grouped", "weight"])
def test_other_memory_layouts(kind):
    """A permuted parameter (channels_last and worse) takes the same steps as a contiguous one."""
    shape, group, index = GROUPS[kind]
    w, options = start(shape), {**COUPLING, "momentum": 0.9, "scaling": True}
    p = torch.nn.Parameter(torch.from_numpy(w.copy()).transpose(0, -1).contiguous().transpose(0, -1))
    assert not p.is_contiguous()
    follow(DessiLBI([{"params": [p], "group": group}], **options), Oracle(w, index, **options), p)


def test_pieces_of_a_long_tensor(monkeypatch):
    """A tensor worked off in many pieces takes the same step as in one."""
    from dessilbi.kernels import foreach

    monkeypatch.setattr(foreach, "PIECE", 5)
    for kind in GROUPS:
        for scaling in (False, True):
            test_dessilbi(kind, "decay", scaling)
