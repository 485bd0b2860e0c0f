"""What the baselines prune: the tensors that DessiLBI would penalise, and one score for each of their groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dessilbi.groups import Partition, Slices, entry, partition
from dessilbi.roles import param_groups
from dessilbi.selection import Selection
from dessilbi.wrappers import clean, unwrap

_LEVELS = ("weight", "filter", "neuron", None)

Excluded = Iterable[str | Tensor | nn.Module]


def partitioned(
    model: nn.Module, conv: str | None = "weight", linear: str | None = "weight", exclude: Excluded = ()
) -> dict[str, tuple[nn.Parameter, Partition]]:
    """The parameters to be pruned and how each is cut into groups, by name and in the model's order.

    They are those that `param_groups` penalises. `conv` and `linear` are "weight" (every element by itself),
    "filter" or "neuron" (one decision an output channel), or None (left alone).
    """
    for argument, kind in (("conv", conv), ("linear", linear)):
        if kind not in _LEVELS:
            raise ValueError(f"{argument} must be 'weight', 'filter', 'neuron' or None, got {kind!r}")
    inner = unwrap(model)
    parts = {
        id(p): partition(entry(group["group"], i), p.shape)
        for group in param_groups(inner, conv, linear, exclude)
        for i, (_, p) in enumerate(group["params"])
    }
    found = {}
    for name, p in inner.named_parameters():
        part = parts.get(id(p))
        if part is not None:
            found[clean(name)] = (p, part)
    if not found:
        raise ValueError(
            f"nothing to prune: with conv={conv!r}, linear={linear!r} and exclude={exclude!r} no trainable weight of "
            "the model is left; name a kind for its layers"
        )
    return found


def check_moved(found: Mapping[str, tuple[Tensor, Partition]], optimizer: Optimizer) -> None:
    """Raise a ValueError if the optimizer does not move one of these parameters."""
    moved = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, (p, _) in found.items():
        if id(p) not in moved:
            raise ValueError(
                f"{name} is not one of the optimizer's parameters: make the optimizer of this model, or leave it out "
                f"(exclude={name!r})"
            )


def size(x: Tensor, part: Partition, ord: float = 1) -> Tensor:
    """‖x_g‖ in the norm of that order: one number a filter or neuron; |x| itself where elements are the groups."""
    if not isinstance(part, Slices):
        return x.abs()
    view = part.split(x)
    norms: Tensor = torch.linalg.vector_norm(view, ord, dim=[a for a in range(view.ndim) if a not in part.axes])
    return norms.flatten()


def selection(masks: Mapping[str, Tensor], level: str | None = None, **source: Any) -> Selection:
    """A Selection of these masks; `level` is by default "weight", or "filter" if a mask has one entry a filter."""
    if level is None:
        level = "filter" if any(mask.ndim == 1 for mask in masks.values()) else "weight"
    return Selection(masks, level, source)
