"""The optimizer iteration in plain float64 NumPy, written from SPEC.md section 1 alone.

This is a reference to test against: it loops over groups in Python, keeps nothing clever, and shares
no code with the library. The notation is that of the specification: W the weights, V the dual,
Γ (``gamma``) the sparse copy, D = (W - Γ) / ν the coupling, u the momentum buffer.

Groups are given by an integer array of the shape of the tensor: every element's group number, 0..n-1.
"""

import math

import numpy as np


def group_index(shape, kind, *, transposed=False, conv_groups=1):
    """Every element's group number, as an integer array of `shape`.

    kind: "weight" (each element its own group, in C order), "filter" (output channel of a convolution),
    "neuron" (row of a matrix), "input" (column of a matrix), "layer" (everything one group).

    A convolution's weight is (out, in/G, *k), so its output channel is axis 0, grouped or not. A transposed
    convolution's weight is (in, out/G, *k): input channel i belongs to the convolution group i // (in/G),
    which writes the out/G output channels that start at (that group) * (out/G).
    """
    shape = tuple(shape)
    index = np.zeros(shape, dtype=np.int64)
    if kind in ("neuron", "input") and len(shape) != 2:
        raise ValueError(f"kind {kind!r} needs a matrix, got shape {shape}")
    if kind == "filter" and transposed and shape[0] % conv_groups:
        raise ValueError(f"{shape[0]} input channels do not divide into {conv_groups} groups")
    for number, position in enumerate(np.ndindex(*shape)):
        if kind == "weight":
            index[position] = number
        elif kind == "filter" and not transposed:
            index[position] = position[0]
        elif kind == "filter":
            in_per_group = shape[0] // conv_groups
            out_per_group = shape[1]
            index[position] = (position[0] // in_per_group) * out_per_group + position[1]
        elif kind == "neuron":
            index[position] = position[0]
        elif kind == "input":
            index[position] = position[1]
        elif kind == "layer":
            index[position] = 0
        else:
            raise ValueError(f"unknown kind {kind!r}")
    return index


def members(index):
    """For each group 0..n-1 the flat (C order) positions of its elements."""
    numbers = [int(g) for g in np.asarray(index).ravel()]
    if numbers and min(numbers) < 0:
        raise ValueError(f"negative group number {min(numbers)}")
    positions = [[] for _ in range(max(numbers, default=-1) + 1)]
    for position, group in enumerate(numbers):
        positions[group].append(position)
    return positions


def norms(x, index):
    """The Euclidean norm of each group (the absolute value, for a group of one): one number a group."""
    flat = np.asarray(x, dtype=np.float64).ravel()
    return np.array([math.hypot(*flat[positions]) for positions in members(index)], dtype=np.float64)


def support_size(x, index):
    """The number of groups with an element that is not zero."""
    flat = np.asarray(x, dtype=np.float64).ravel()
    return sum(any(flat[position] != 0 for position in positions) for positions in members(index))


def prox(v, index, lam, size_normalised=False):
    """V_g · max(0, 1 - λ/‖V_g‖), and for a group of one sign(v) · max(|v| - λ, 0). A zero norm gives zero."""
    v = np.asarray(v, dtype=np.float64)
    flat = v.ravel()
    out = np.zeros_like(flat)
    for positions in members(index):
        threshold = lam * math.sqrt(len(positions)) if size_normalised else lam
        norm = math.hypot(*flat[positions])
        if norm <= threshold:
            continue  # stays zero; a zero norm ends here too
        if len(positions) == 1:
            out[positions] = math.copysign(norm - threshold, flat[positions[0]])
        else:
            out[positions] = flat[positions] * (1 - threshold / norm)
    return out.reshape(v.shape)


class _Split:
    """V and Γ of one tensor. How W moves is the subclasses' business.

    `lr` and `lam` (and the other settings) are read when they are used and may be reassigned between steps.
    Without groups (index None) the tensor is not penalised: D, V and Γ are zero.
    """

    def __init__(self, w, index, *, lr, kappa, nu, lam, scaling, beta_min, maximize, size_normalised):
        self.W = np.array(w, dtype=np.float64)
        self.V = np.zeros_like(self.W)
        self.index = None if index is None else np.array(index, dtype=np.int64)
        if self.index is not None and self.index.shape != self.W.shape:
            raise ValueError(f"index of shape {self.index.shape} for weights of shape {self.W.shape}")
        self.lr = lr
        self.kappa = kappa
        self.nu = nu
        self.lam = lam
        self.scaling = scaling
        self.beta_min = beta_min
        self.maximize = maximize
        self.size_normalised = size_normalised
        self.epsilon = np.ones_like(self.W)  # ε of the last step; before the first, Γ is 0 whatever it is

    def gamma(self):
        """Γ = κ · ε ⊙ Prox_λ(V), with the λ now in force and the ε of the last step."""
        if self.index is None:
            return np.zeros_like(self.W)
        return self.kappa * self.epsilon * prox(self.V, self.index, self.lam, self.size_normalised)

    def coupling(self):
        """D = (W - Γ) / ν."""
        if self.index is None or math.isinf(self.nu):
            return np.zeros_like(self.W)
        return (self.W - self.gamma()) / self.nu

    def scales(self):
        """β and ε of magnitude scaling from W and Γ as they stand, one value an element."""
        if self.index is None or not self.scaling:
            return np.ones_like(self.W), np.ones_like(self.W)
        on_w = support_size(self.W, self.index)
        on_gamma = support_size(self.gamma(), self.index)
        rho = on_gamma / on_w if on_w else 0.0
        n = norms(self.W, self.index)
        beta, epsilon = np.zeros(self.W.size), np.zeros(self.W.size)
        for group, positions in enumerate(members(self.index)):
            # n > 1 exactly when 1/n < 1; so n = 0 gives 1
            beta[positions] = (1 / n[group] if n[group] > 1 else 1.0) * max(1 - rho, self.beta_min)
            epsilon[positions] = n[group]
        return beta.reshape(self.W.shape), epsilon.reshape(self.W.shape)

    def signed(self, grad):
        """The gradient of what is minimised. Weight decay and coupling keep their sign under `maximize`."""
        grad = np.asarray(grad, dtype=np.float64)
        if grad.shape != self.W.shape:
            raise ValueError(f"gradient of shape {grad.shape} for weights of shape {self.W.shape}")
        return -grad if self.maximize else grad

    def step(self, grad):
        """One iteration with the loss gradient `grad` at W."""
        d = self.coupling()  # everything on these two lines is from before the step
        beta, epsilon = self.scales()
        w_new = self.moved(self.signed(grad), d)
        self.V = self.V + self.lr * beta * d
        self.epsilon = epsilon
        self.W = w_new

    def moved(self, g, d):
        """W after the step."""
        raise NotImplementedError


class Oracle(_Split):
    """The iteration on the base of SGD. `u` is the momentum buffer: None until used."""

    def __init__(
        self,
        w,
        index,
        *,
        lr,
        kappa=1.0,
        nu=100.0,
        lam=1.0,
        momentum=0.0,
        dampening=0.0,
        nesterov=False,
        weight_decay=0.0,
        decoupled_weight_decay=False,
        scaling=False,
        beta_min=1e-2,
        maximize=False,
        size_normalised=False,
    ):
        super().__init__(
            w,
            index,
            lr=lr,
            kappa=kappa,
            nu=nu,
            lam=lam,
            scaling=scaling,
            beta_min=beta_min,
            maximize=maximize,
            size_normalised=size_normalised,
        )
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError(f"nesterov with momentum={momentum}, dampening={dampening}")  # as torch
        self.momentum = momentum
        self.dampening = dampening
        self.nesterov = nesterov
        self.weight_decay = weight_decay
        self.decoupled_weight_decay = decoupled_weight_decay
        self.u = None

    def moved(self, g, d):
        total = g + d if self.decoupled_weight_decay else g + self.weight_decay * self.W + d

        if self.momentum == 0:
            direction = total
        else:
            if self.u is None:
                self.u = total.copy()  # the first one is not damped
            else:
                self.u = self.momentum * self.u + (1 - self.dampening) * total
            direction = total + self.momentum * self.u if self.nesterov else self.u

        w_new = self.W - self.kappa * self.lr * direction
        if self.decoupled_weight_decay:
            w_new = w_new - self.weight_decay * self.W
        return w_new


class AdamWOracle(_Split):
    """The iteration on the base of AdamW: `m` and `s` are its first and second moments, `t` its step count."""

    def __init__(
        self,
        w,
        index,
        *,
        lr,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=1e-2,
        kappa=1.0,
        nu=100.0,
        lam=1.0,
        scaling=False,
        beta_min=1e-2,
        maximize=False,
        size_normalised=False,
    ):
        super().__init__(
            w,
            index,
            lr=lr,
            kappa=kappa,
            nu=nu,
            lam=lam,
            scaling=scaling,
            beta_min=beta_min,
            maximize=maximize,
            size_normalised=size_normalised,
        )
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.m = np.zeros_like(self.W)
        self.s = np.zeros_like(self.W)
        self.t = 0

    def moved(self, g, d):
        total = g + d
        b1, b2 = self.betas
        step_size = self.kappa * self.lr
        self.t += 1
        self.m = b1 * self.m + (1 - b1) * total
        self.s = b2 * self.s + (1 - b2) * total**2
        m_hat = self.m / (1 - b1**self.t)
        s_hat = self.s / (1 - b2**self.t)
        decayed = self.W * (1 - step_size * self.weight_decay)
        return decayed - step_size * m_hat / (np.sqrt(s_hat) + self.eps)
