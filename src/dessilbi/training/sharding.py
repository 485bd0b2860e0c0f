"""States of sharded parameters (FSDP2): whole in a checkpoint, so that any number of processes can go on from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer


def local(tensor: Tensor) -> Tensor:
    """This process's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """The whole tensor; all processes must ask for it."""
    whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole


def gathered(state: Any) -> Any:
    """A state with whole tensors in place of sharded ones; all processes must ask for it."""
    if isinstance(state, Tensor):
        return full(state)
    if isinstance(state, Mapping):
        return {k: gathered(v) for k, v in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(map(gathered, state))
    return state


def scattered(state: dict[str, Any], model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The reverse of `gathered` for a session's state: what belongs to a sharded parameter is sharded like it."""
    params = dict(model.named_parameters())
    weights = {name: _like(value, params.get(name)) for name, value in state["model"].items()}
    saved = state["optimizer"]
    moved = {}
    for mine, theirs in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        for p, index in zip(mine["params"], theirs["params"], strict=True):
            moved[index] = {key: _like(value, p) for key, value in saved["state"].get(index, {}).items()}
    return {**state, "model": weights, "optimizer": {**saved, "state": {k: v for k, v in moved.items() if v}}}


def _like(value: Any, p: Tensor | None) -> Any:
    if isinstance(p, DTensor) and isinstance(value, Tensor) and value.shape == p.shape:
        return distribute_tensor(value.to(p.device), p.device_mesh, p.placements)
    return value
