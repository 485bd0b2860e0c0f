"""The optimizers: thin classes over the kernels, in the manners of torch.optim."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from dessilbi.groups import Number
from dessilbi.kernels import Bucket, Kernel, adamw_kernel, sgd_kernel
from dessilbi.scalespace import InverseScaleSpace, state_like, step_device


class DessiLBI(InverseScaleSpace):
    r"""SGD that finds the network's structure while it trains (DessiLBI).

    Beside the weights W, every penalised tensor has a dual variable V and a sparse Γ, its reading. With G the gradient
    of the loss, D = (W − Γ)/ν, and α = `lr`, κ = `kappa`, ν = `nu`, λ = `lam`:

    .. math::
        u &\leftarrow \mu u + (1 - \text{dampening})(G + \text{wd}\, W + D) \\
        V &\leftarrow V + \alpha\, \beta \odot D \\
        W &\leftarrow W - \kappa \alpha\, u \\
        \Gamma &= \kappa\, \varepsilon \odot \mathrm{Prox}_\lambda(V)

    V grows with the weights that training keeps asking for, and a group enters Γ when its ‖V_g‖ passes λ: important
    groups first. `support(p)` is the structure found so far. β = ε = 1 unless `scaling` is on. The state is that of
    SGD and one tensor more, V; Γ is computed, not stored.

    Args:
        params: tensors, (name, tensor) pairs or param groups, each with an optional `group`, the kind of its
            groups: "weight", "filter", "neuron", "input", "layer", a :class:`~dessilbi.Partition`, or None (not
            penalised; plain SGD with step κα), or a list of these, one a parameter. Without `group`, tensors of three
            or more dimensions are "filter", matrices "weight", and the rest is not penalised. :func:`param_groups`
            sorts a whole model.
        lr: the step size α; a number, or a 0-d tensor where the step is captured in a CUDA graph.
        kappa: damping; W moves with κα.
        nu: how far Γ may lag behind W. 1/ν acts on unselected weights like extra weight decay: too small a ν costs
            accuracy, too large a ν slows the path. 100 to 2000 for image networks; `inf` switches the coupling off.
        lam: the threshold; higher is sparser. What it should be grows with path time Σα: let
            :class:`~dessilbi.TargetThreshold` set it if you know which fraction you want to keep. A number, a 0-d
            tensor, or a tensor with one entry a parameter of the group.
        momentum, dampening, nesterov, weight_decay, maximize, foreach: as in :class:`torch.optim.SGD`.
        fused: True: one pass over memory, or an error that says why not. None: where it costs no compilation.
        decoupled_weight_decay: the paper's Mom-Wd form, W ← … − wd·W, not multiplied by the step size.
        scaling: magnitude scaling, which makes the ‖V_g‖ of different layers comparable: V moves by
            β_j = max(1 − ρ, beta_min)/max(1, ‖W_j‖), with ρ the selected fraction of the layer, and ε_j = ‖W_j‖.
        beta_min: the least that the factor 1 − ρ may become.
        error_if_nonfinite: raise, and change nothing, if a gradient is NaN or infinite. It waits for the device at
            every step. By default such gradients do what they do in torch.

    `opt.lam = x` sets λ between steps. A step size α < 2/(κ(L + 2/ν)), L the Lipschitz constant of the gradient, is
    always safe without momentum.
    """

    _rules: ClassVar = {
        **InverseScaleSpace._rules,
        "momentum": (lambda x: 0 <= x < 1, "a number in [0, 1)"),
        "dampening": (lambda x: -math.inf < x < math.inf, "a finite number"),
    }

    def __init__(
        self,
        params: ParamsT,
        lr: Number,
        *,
        kappa: float = 1.0,
        nu: float = 100.0,
        lam: Number = 1.0,
        momentum: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        scaling: bool = False,
        beta_min: float = 1e-2,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        error_if_nonfinite: bool = False,
    ) -> None:
        options = locals()
        super().__init__(params, {k: v for k, v in options.items() if k not in ("self", "params", "__class__")})

    def _check_options(self, options: dict[str, Any]) -> None:
        super()._check_options(options)
        if options["nesterov"] and (options["momentum"] <= 0 or options["dampening"] != 0):
            raise ValueError(
                "nesterov=True needs momentum > 0 and dampening = 0, "
                f"got momentum={options['momentum']!r}, dampening={options['dampening']!r}"
            )

    def _kernel(self, bucket: Bucket) -> Kernel:
        return sgd_kernel(bucket)

    def _begin(self, p: Tensor, state: dict[str, Any], options: dict[str, Any]) -> bool:
        if not options["momentum"] or "momentum_buffer" in state:
            return False
        state["momentum_buffer"] = state_like(p)
        return True


class DessiAdamW(InverseScaleSpace):
    r"""AdamW that finds the network's structure while it trains.

    V and Γ move as in :class:`DessiLBI`; W moves by :class:`torch.optim.AdamW`, with step κα, applied to G + D. For
    transformers, and wherever SGD does not train. Arguments as in both; `nu=inf` is AdamW.
    """

    _rules: ClassVar = {
        **InverseScaleSpace._rules,
        "eps": (lambda x: 0 <= x < math.inf, "a finite number ≥ 0"),
    }

    def __init__(
        self,
        params: ParamsT,
        lr: Number = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        kappa: float = 1.0,
        nu: float = 100.0,
        lam: Number = 1.0,
        scaling: bool = False,
        beta_min: float = 1e-2,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        error_if_nonfinite: bool = False,
    ) -> None:
        options = locals()
        super().__init__(params, {k: v for k, v in options.items() if k not in ("self", "params", "__class__")})

    def _check_options(self, options: dict[str, Any]) -> None:
        super()._check_options(options)
        betas: Sequence[float] = options["betas"]
        if len(betas) != 2 or not all(0 <= b < 1 for b in betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {betas!r}")

    def _kernel(self, bucket: Bucket) -> Kernel:
        return adamw_kernel(bucket)

    def _begin(self, p: Tensor, state: dict[str, Any], options: dict[str, Any]) -> bool:
        if "step" in state:
            return False
        state["step"] = torch.zeros((), device=step_device(p, options))
        state["exp_avg"], state["exp_avg_sq"] = state_like(p), state_like(p)
        return True
