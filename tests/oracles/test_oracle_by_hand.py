"""The oracle against numbers worked out by hand (in the comments)."""

import math

import numpy as np
import pytest

from .iteration import AdamWOracle, Oracle, group_index, norms, prox


def close(values):
    return pytest.approx(np.array(values, dtype=float), rel=1e-13, abs=1e-15)


def test_group_numbers():
    assert group_index((2, 3), "weight").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert group_index((2, 3), "neuron").tolist() == [[0, 0, 0], [1, 1, 1]]
    assert group_index((2, 3), "input").tolist() == [[0, 1, 2], [0, 1, 2]]
    assert group_index((2, 3), "layer").tolist() == [[0, 0, 0], [0, 0, 0]]
    assert group_index((2, 1, 2), "filter").tolist() == [[[0, 0]], [[1, 1]]]
    # Transposed, (in, out/G, k) = (4, 2, 1). G = 1: the output channel is the second axis.
    assert group_index((4, 2, 1), "filter", transposed=True)[..., 0].tolist() == [[0, 1]] * 4
    # G = 2: inputs 0, 1 write outputs 0, 1 and inputs 2, 3 write outputs 2, 3.
    got = group_index((4, 2, 1), "filter", transposed=True, conv_groups=2)[..., 0]
    assert got.tolist() == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_prox():
    # Groups (3, 4), (-0.5), (-2), (0, 0): norms 5, 0.5, 2, 0.
    v, index = [3.0, 4.0, -0.5, -2.0, 0.0, 0.0], [0, 0, 1, 2, 3, 3]
    assert norms(v, index) == close([5, 0.5, 2, 0])
    # λ = 1: factor 1 - 1/5 = 0.8; 0.5 < 1 gives 0; -(2 - 1) = -1; zero norm gives 0.
    assert prox(v, index, 1.0) == close([2.4, 3.2, 0, -1, 0, 0])
    # λ = 0 is the identity, the zero norm included.
    assert prox(v, index, 0.0) == close(v)
    # Size-normalised, λ = 1: the first threshold becomes √2, the groups of one keep theirs.
    factor = 1 - math.sqrt(2) / 5
    assert prox(v, index, 1.0, size_normalised=True) == close([3 * factor, 4 * factor, 0, -1, 0, 0])


def test_one_weight_with_momentum_and_a_changing_threshold():
    o = Oracle([4.0], [0], lr=0.5, kappa=2, nu=2, lam=0.5, momentum=0.5, dampening=0.5)
    assert o.u is None
    assert o.gamma() == close([0])
    # D = (4 - 0)/2 = 2; u = 1 + 2 = 3, not damped; V = 0 + 0.5·2 = 1; W = 4 - 2·0.5·3 = 1; Γ = 2·(1 - 0.5) = 1.
    o.step([1.0])
    assert (o.u[0], o.V[0], o.W[0], o.gamma()[0]) == (3, 1, 1, 1)
    # D = (1 - 1)/2 = 0; u = 0.5·3 + 0.5·(-1) = 1; V = 1; W = 1 - 1 = 0; Γ = 1.
    o.step([-1.0])
    assert (o.u[0], o.V[0], o.W[0], o.gamma()[0]) == (1, 1, 0, 1)
    # λ = 0.25: Γ = 2·(1 - 0.25) = 1.5 at once.
    o.lam = 0.25
    assert o.gamma()[0] == 1.5
    # D = (0 - 1.5)/2 = -0.75; u = 0.5·1 + 0.5·(-0.75) = 0.125; V = 1 - 0.5·0.75 = 0.625; W = 0 - 0.125;
    # Γ = 2·(0.625 - 0.25) = 0.75.
    o.step([0.0])
    assert (o.u[0], o.V[0], o.W[0], o.gamma()[0]) == (0.125, 0.625, -0.125, 0.75)


def test_the_two_weight_decays_nesterov_and_maximize():
    # In the gradient, nesterov, maximize, ν = 1: Γ = 0, D = 2; g = -1 + 0.25·2 + 2 = 1.5, u = 1.5,
    # direction 1.5 + 0.5·1.5 = 2.25; W = 2 - 0.5·2.25 = 0.875; V = 0.5·2 = 1.
    o = Oracle([2.0], [0], lr=0.5, nu=1, momentum=0.5, nesterov=True, weight_decay=0.25, maximize=True)
    o.step([1.0])
    assert (o.u[0], o.W[0], o.V[0]) == (1.5, 0.875, 1)
    # V = λ = 1 exactly: Γ = 0, D = 0.875; g = 0 + 0.25·0.875 + 0.875 = 1.09375; u = 0.75 + 1.09375 = 1.84375,
    # direction 1.09375 + 0.921875 = 2.015625; W = 0.875 - 1.0078125 = -0.1328125; V = 1.4375, Γ = 0.4375.
    o.step([0.0])
    assert (o.u[0], o.W[0], o.V[0], o.gamma()[0]) == (1.84375, -0.1328125, 1.4375, 0.4375)
    # Decoupled, no groups: u = 1, W = 2 - 0.5·1 - 0.25·2 = 1; then u = 0.5·1 + 1 = 1.5, W = 1 - 0.75 - 0.25 = 0.
    o = Oracle([2.0], None, lr=0.5, nu=1, momentum=0.5, weight_decay=0.25, decoupled_weight_decay=True)
    o.step([1.0])
    assert (o.u[0], o.W[0]) == (1, 1)
    o.step([1.0])
    assert (o.u[0], o.W[0], o.V[0]) == (1.5, 0, 0)


def test_magnitude_scaling():
    o = Oracle([3.0, 4.0, 0.5], [0, 0, 1], lr=1.0, nu=1, lam=0.75, scaling=True, beta_min=0.25)
    # n = (5, 0.5), ρ = 0/2, β = (1/5, 1), D = W = (3, 4, 0.5): V = (0.6, 0.8, 0.5), W = W - (G + D) = (0, 0, 2).
    # ‖V‖ = (1, 0.5), λ = 0.75: Prox = (0.15, 0.2, 0), times n: Γ = (0.75, 1, 0).
    o.step([0.0, 0.0, -2.0])
    assert o.V == close([0.6, 0.8, 0.5])
    assert o.W == close([0, 0, 2])
    assert o.gamma() == close([0.75, 1, 0])
    # n = (0, 2), ρ = 1/1, β = (1, 1/2)·max(0, 0.25) = (0.25, 0.125), D = (-0.75, -1, 2):
    # V = (0.6 - 0.1875, 0.8 - 0.25, 0.5 + 0.25) = (0.4125, 0.55, 0.75), W = (0, 0, 2) - (G + D) = (0.75, 1, 1).
    o.step([0.0, 0.0, -1.0])
    assert o.V == close([0.4125, 0.55, 0.75])
    assert o.W == close([0.75, 1, 1])
    # λ = 0.5: ‖V‖ = (0.6875, 0.75). Group 0 passes the threshold but had n = 0; group 1: 2·(0.75 - 0.5) = 0.5.
    o.lam = 0.5
    assert o.gamma() == close([0, 0, 0.5])
    # n = (1.25, 1), ρ = 1/2, β = (0.8, 1)·0.5, D = (0.75, 1, 0.5):
    # V = (0.4125 + 0.3, 0.55 + 0.4, 0.75 + 0.25) = (0.7125, 0.95, 1); ‖V_0‖ = 0.6875 + 0.5 = 1.1875.
    # Γ = 1.25·(1 - 0.5/1.1875)·(0.7125, 0.95) = (0.515625, 0.6875), as V_0 = 1.1875·(0.6, 0.8); 1·(1 - 0.5) = 0.5.
    o.step([0.0, 0.0, 0.0])
    assert o.V == close([0.7125, 0.95, 1])
    assert o.gamma() == close([0.515625, 0.6875, 0.5])


def test_adamw():
    o = AdamWOracle([2.0], [0], lr=0.1, betas=(0.5, 0.75), eps=1.0, weight_decay=0.5, kappa=2, nu=1, lam=0.3)
    # D = 2, g = 1 + 2 = 3; m = 1.5, s = 0.25·9 = 2.25, corrected 3 and 9; κα = 0.2:
    # W = 2·(1 - 0.2·0.5) - 0.2·3/(3 + 1) = 1.8 - 0.15 = 1.65; V = 0.1·2 = 0.2, Γ = 0.
    o.step([1.0])
    assert (o.W, o.V, o.gamma()) == (close([1.65]), close([0.2]), close([0]))
    # D = 1.65, g = -0.65 + 1.65 = 1; m = 0.75 + 0.5 = 1.25, over 1 - 1/4: 5/3; s = 1.6875 + 0.25 = 1.9375,
    # over 1 - 9/16: 31/7; W = 1.65·0.9 - 0.2·(5/3)/(√(31/7) + 1); V = 0.2 + 0.165 = 0.365, Γ = 2·0.065 = 0.13.
    o.step([-0.65])
    assert o.W == close([1.485 - (1 / 3) / (math.sqrt(31 / 7) + 1)])
    assert (o.V, o.gamma()) == (close([0.365]), close([0.13]))
