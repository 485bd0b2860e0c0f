"""The optimizer of a run: ours, or any of torch.optim."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dessilbi.optim import DessiAdamW, DessiLBI
from dessilbi.roles import param_groups
from dessilbi.training.config import Config

_OURS: dict[str, type[DessiLBI] | type[DessiAdamW]] = {"dessilbi": DessiLBI, "dessiadamw": DessiAdamW}
# Optimizers of the baselines. Those with a `lam` take the same param groups as ours.
_PEERS = {
    "adabound": "dessilbi.baselines.adabound:AdaBound",
    "linbreg": "dessilbi.baselines.bregman:LinBreg",
    "adabreg": "dessilbi.baselines.bregman:AdaBreg",
}
_SHARED = ("momentum", "nesterov", "weight_decay", "decoupled_weight_decay", "kappa", "nu", "scaling", "beta_min")
# LBFGS asks for several passes a step, SparseAdam for sparse gradients.
_UNFIT = ("optimizer", "lbfgs", "sparseadam")


def build(config: Config, model: nn.Module, device: torch.device, shape: Sequence[int] = ()) -> Optimizer:
    """The optimizer that the configuration names, on the model's parameters; `shape` is that of an image."""
    kind = find(config.optimizer)
    known = inspect.signature(kind).parameters
    options = {name: getattr(config, name) for name in _SHARED if name in known}
    if config.fused is not None and "fused" in known:
        options["fused"] = config.fused
    captured = config.compile == "graph"
    if captured and config.bregman:
        raise ValueError(f"optimizer={config.optimizer!r} cannot be captured in a CUDA graph: set compile='none'")
    # A graph reads its hyperparameters on the device: tensors, changed in place between replays.
    lr: Any = torch.tensor(config.lr, device=device) if captured else config.lr
    params: Any = [p for p in model.parameters() if p.requires_grad]
    if "lam" in known:
        options["lam"] = torch.tensor(config.lam, device=device) if captured else config.lam
        conv, linear = (None if kind == "none" else kind for kind in (config.conv, config.linear))
        example = torch.zeros(2, *shape, device=device) if conv == "channel" else None
        params = param_groups(model, conv, linear, config.exclude, example)
    elif captured:
        options |= {"capturable": True} if "capturable" in known else {"fused": True} if "fused" in known else {}
        if "capturable" not in known and "fused" not in known:
            raise ValueError(f"optimizer={config.optimizer!r} cannot be captured in a CUDA graph: set compile='none'")
    options |= config.optimizer_options
    try:
        return kind(params, **{"lr": lr, **options})
    except TypeError as error:
        raise ValueError(f"optimizer={config.optimizer!r} with optimizer_options={dict(config.optimizer_options)!r}: "
                         f"{error}") from None  # fmt: skip


def find(name: str) -> type[Optimizer]:
    """The class of an optimizer, by its name in any case."""
    if name in _OURS:
        return _OURS[name]
    if name in _PEERS:
        module, _, kind = _PEERS[name].partition(":")
        return getattr(import_module(module), kind)  # type: ignore[no-any-return]
    classes = {
        word.lower(): kind
        for word, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and word.lower() not in _UNFIT
    }
    if name in classes:
        return classes[name]
    known = [*_OURS, *_PEERS, *sorted(classes)]
    near = get_close_matches(name, known, n=1)
    if name in _UNFIT:
        raise ValueError(f"optimizer={name!r} does not work with mini-batches here: choose one of {', '.join(known)}")
    raise ValueError(f"optimizer={name!r}: " + (f"did you mean {near[0]!r}?" if near else f"choose one of "
                     f"{', '.join(known)}"))  # fmt: skip


def load(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """`load_state_dict`, after which hyperparameters that were tensors on a device are that again."""
    held = [{k: v for k, v in group.items() if isinstance(v, torch.Tensor)} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, tensors in zip(optimizer.param_groups, held, strict=True):
        for name, tensor in tensors.items():
            value = group[name]
            if value is not tensor:
                tensor.copy_(torch.as_tensor(value))
                group[name] = tensor
        lam = group.get("lam")  # the target's λ lives where the parameters do
        if isinstance(lam, torch.Tensor) and group["params"]:
            group["lam"] = lam.to(group["params"][0].device)
