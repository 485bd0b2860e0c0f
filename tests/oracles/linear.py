"""LBI and Split LBI in plain float64 NumPy, written from the appendix of the paper: every step on all of the data.

It keeps nothing clever and shares no code with the library. Coefficients are features × outputs, units of a penalty are
given by `unit`, an integer array of the shape of z: every element's group number.
"""

from itertools import pairwise

import numpy as np


def standardise(x, weights, centre=True, scale=True):
    """(x − mean)/deviation with weighted means, and both of these."""
    w = weights / weights.sum()
    mean = w @ x if centre else np.zeros(x.shape[1])
    deviation = np.sqrt(w @ (x - mean) ** 2) if scale else np.ones(x.shape[1])
    return (x - mean) / deviation, mean, deviation


def gradient(loss, eta, y, weights):
    """The derivative of the weighted mean loss by the linear predictors, sample by sample."""
    w = weights / weights.sum()
    if loss == "squared":
        expected = eta
    elif loss == "logistic":
        expected = 1 / (1 + np.exp(-eta))
    else:
        e = np.exp(eta - eta.max(1)[:, None])
        expected = e / e.sum(1)[:, None]
    return w[:, None] * (expected - y)


def null_intercept(loss, y, weights):
    """The best constant predictor."""
    mean = (weights / weights.sum()) @ y
    if loss == "squared":
        return mean
    if loss == "logistic":
        return np.log(mean / (1 - mean))
    return np.log(mean) - np.log(mean).mean()


def norms(z, unit):
    """The norm of every unit."""
    return np.array([np.sqrt((z[unit == g] ** 2).sum()) for g in range(unit.max() + 1)])


def prox(z, unit):
    """argmin_γ Ω(γ) + ‖γ − z‖²/2, unit by unit."""
    result = np.zeros_like(z)
    for g, norm in enumerate(norms(z, unit)):
        if norm > 1:
            result[unit == g] = z[unit == g] * (1 - 1 / norm)
    return result


def lbi(x, y, loss, weights, unit, kappa, alpha, steps, intercept=None, start=0.0):
    """States (t, z, b) of LBI from t = 0 on; `start`: z stands at −start·∇L(0) first, at the time `start`.

    `intercept`: where b starts; None: there is no b, and none moves. For the squared loss of centred features b is the
    mean of y and stays.
    """
    b = np.zeros(y.shape[1]) if intercept is None else intercept
    z = np.zeros((x.shape[1], y.shape[1]))
    states, t = [(0.0, z, b)], 0.0
    if start:
        t, z = start, -start * (x.T @ gradient(loss, x @ z + b, y, weights))
        states.append((t, z, b))
    for _ in range(steps):
        r = gradient(loss, x @ (kappa * prox(z, unit)) + b, y, weights)
        z = z - alpha * (x.T @ r)
        if intercept is not None and loss != "squared":
            b = b - kappa * alpha * r.sum(0)
        t += alpha
        states.append((t, z, b))
    return states


def split_lbi(x, y, d, loss, weights, unit, nu, kappa, alpha, steps, intercept=None):
    """States (t, β, z, b) of Split LBI: the three lines of the appendix."""
    b = np.zeros(y.shape[1]) if intercept is None else intercept
    beta = np.zeros((x.shape[1], y.shape[1]))
    z = np.zeros((d.shape[0], y.shape[1]))
    gamma = z
    states, t = [(0.0, beta, z, b)], 0.0
    for _ in range(steps):
        r = gradient(loss, x @ beta + b, y, weights)
        by_beta = x.T @ r + d.T @ (d @ beta - gamma) / nu
        by_gamma = (gamma - d @ beta) / nu
        beta = beta - kappa * alpha * by_beta
        z = z - alpha * by_gamma
        gamma = kappa * prox(z, unit)
        if intercept is not None and loss != "squared":
            b = b - kappa * alpha * r.sum(0)
        t += alpha
        states.append((t, beta, z, b))
    return states


def at(states, t):
    """The state at a time, linear between steps; the last one beyond them."""
    times = [state[0] for state in states]
    k = min(int(np.searchsorted(times, t)), len(times) - 1)
    if k == 0 or times[k] <= t:
        return states[k][1:]
    share = (t - times[k - 1]) / (times[k] - times[k - 1])
    return tuple(a + share * (b - a) for a, b in zip(states[k - 1][1:], states[k][1:], strict=True))


def entries(states, unit, which=1):
    """When the norm of each unit of z first passed 1, linear between steps."""
    result = np.full(unit.max() + 1, np.inf)
    for before, after in pairwise(states):
        old, new = norms(before[which], unit), norms(after[which], unit)
        for g in np.flatnonzero((new > 1) & np.isinf(result)):
            share = min(max((1 - old[g]) / (new[g] - old[g]), 0), 1)
            result[g] = before[0] + share * (after[0] - before[0])
    return result


def projection(beta, rows):
    """The nearest β with rows @ β = 0."""
    return beta - np.linalg.pinv(rows) @ (rows @ beta) if len(rows) else beta
