"""Example inputs: a tensor, a tuple of positional arguments or a dict of named ones, with the batch first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def split(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and the named arguments."""
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs), {}
    raise TypeError(
        f"example_inputs is a {type(example_inputs).__name__}: give a tensor, a tuple of positional arguments or a dict"
        " of named ones"
    )


def batch_size(example_inputs: Any) -> int:
    """The length of the first dimension of the first tensor that has one."""
    args, kwargs = split(example_inputs)
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.dim():
            return int(value.shape[0])
    raise ValueError("example_inputs holds no tensor with a batch dimension: give one, batch first")


def batched(example_inputs: Any, value: Any) -> bool:
    """Whether this argument is a tensor whose first dimension is the batch."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == batch_size(example_inputs)


def random_like(example_inputs: Any, size: int, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of another batch size: normally distributed, integers within the range of the example's.

    Flags and masks (booleans, and integers of 0 and 1) are rows of the example: not every combination is a valid one.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(value: Any) -> Any:
        if not batched(example_inputs, value):
            return value
        shape = (size, *value.shape[1:])
        if value.is_floating_point():
            return torch.randn(shape, generator=generator).to(value)
        if value.dtype != torch.bool and value.numel() and value.max() > 1:
            low, high = int(value.min()), int(value.max())
            return torch.randint(low, high + 1, shape, generator=generator).to(value)
        return value[torch.randint(len(value), (size,), generator=generator).to(value.device)]

    args, kwargs = split(example_inputs)
    return tuple(draw(value) for value in args), {name: draw(value) for name, value in kwargs.items()}


def moved(example_inputs: Any, device: torch.device | str) -> Any:
    """The same on another device."""
    args, kwargs = split(example_inputs)
    there = tuple(v.to(device) if isinstance(v, Tensor) else v for v in args)
    return there or {name: v.to(device) if isinstance(v, Tensor) else v for name, v in kwargs.items()}
