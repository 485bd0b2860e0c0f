"""What goes with parameters when their shapes change: the optimizer's state, and masks that are in force."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dessilbi.coupling import Channels, channels
from dessilbi.enforcement import MaskHandle, in_force
from dessilbi.groups import Labels, Partition, Slices
from dessilbi.surgery.plan import Cut


def carry_masks(old: nn.Module, new: nn.Module, cuts: Mapping[str, Callable[[Tensor], Tensor]], gone: Set[str]) -> None:
    """Put what is in force on the old network, cut alike, in force on the new one."""
    named = dict(new.named_parameters())
    pairs: list[tuple[Tensor, Tensor]] = []
    for name, p in old.named_parameters():
        mask = in_force(p)
        if mask is not None and name in named:
            left = cuts[name](mask) if name in cuts else mask
            if not left.all():
                pairs.append((named[name], left))
    if pairs:
        MaskHandle(pairs)


@torch.no_grad()
def move(
    optimizer: Optimizer,
    old: nn.Module,
    new: nn.Module,
    cuts: Mapping[str, Any],
    regroup: Callable[[Any, list[str]], Any] | None = None,
) -> None:
    """Point an optimizer to the new parameters, its state cut alike; parameters that are gone are dropped.

    `regroup` says how the groups of a param group become those of the new parameters, where that does not follow from
    cuts. Nothing is changed if a parameter of the optimizer is not one of the network.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("LBFGS keeps what it knows in vectors of all parameters: leave it out, and make a new one")
    names = {id(p): name for name, p in old.named_parameters()}
    named = dict(new.named_parameters(remove_duplicate=False))
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) not in names:
                raise ValueError(
                    f"the optimizer has a parameter of shape {tuple(p.shape)} that is not the model's: make it with "
                    "the parameters of the model"
                )
    before = dict(optimizer.state)
    optimizer.state = defaultdict(dict)
    for group in optimizer.param_groups:
        stays = [i for i, p in enumerate(group["params"]) if names[id(p)] in named]
        olds = [group["params"][i] for i in stays]
        if "group" in group:
            group["group"] = (
                _partitions(group["group"], olds, stays, names, named, cuts)
                if regroup is None
                else regroup(group["group"], [names[id(p)] for p in olds])
            )
        for key in ("lam", "param_names"):
            value = group.get(key)
            if isinstance(value, Tensor) and value.ndim == 1:
                group[key] = value[stays]
            elif isinstance(value, list):
                group[key] = [value[i] for i in stays]
        group["params"] = [named[names[id(p)]] for p in olds]
        for p, q in zip(olds, group["params"], strict=True):
            if p in before:
                cut = cuts.get(names[id(p)])
                optimizer.state[q] = {
                    key: cut(value) if cut is not None and isinstance(value, Tensor) and value.ndim else value
                    for key, value in before[p].items()
                }
    if hasattr(optimizer, "_cache"):
        optimizer._cache = {}


def _partitions(
    group: Any, olds: list[Tensor], stays: list[int], names: Mapping[int, str], named: Mapping[str, Tensor],
    cuts: Mapping[str, Cut],
) -> Any:  # fmt: skip
    """The partitions of the parameters that stay, for their new shapes."""
    if isinstance(group, (list, tuple)):
        mine = [group[i] for i in stays]
        made = [_partition(x, cuts.get(names[id(p)])) for x, p in zip(mine, olds, strict=True)]
        for coupling in {id(x.coupling): x.coupling for x in mine if isinstance(x, Channels)}.values():
            members = [i for i, x in enumerate(mine) if isinstance(x, Channels) and x.coupling is coupling]
            joined = _joined([mine[i] for i in members], [names[id(olds[i])] for i in members], named, cuts)
            for i, part in zip(members, joined, strict=True):
                made[i] = part
        return tuple(made)
    if isinstance(group, Partition) and olds:
        return _partition(group, cuts.get(names[id(olds[0])]))
    return group


def _partition(part: Any, cut: Cut | None) -> Any:
    if isinstance(part, Labels) and cut is not None:
        return Labels(torch.unique(cut(part.index), return_inverse=True)[1])
    if isinstance(part, Slices) and part.fold > 1 and cut is not None and cut.groups is not None:
        if cut.groups == 1:
            return replace(part, fold=1, axes=tuple(a - 1 for a in part.axes if a))
        return replace(part, fold=cut.groups)
    return part


def _joined(
    parts: list[Channels], names: list[str], named: Mapping[str, Tensor], cuts: Mapping[str, Cut]
) -> list[Channels]:
    """Channel groups over what stays of their tensors."""
    index = [
        part.index if name not in cuts else part.index[_filters_left(part, cuts[name])]
        for part, name in zip(parts, names, strict=True)
    ]
    numbers = torch.unique(torch.cat(index), return_inverse=True)[1].split([len(i) for i in index])
    shapes = [named[name].shape for name in names]
    filters = [_partition(part.filters, cuts.get(name)) for part, name in zip(parts, names, strict=True)]
    return channels(zip(shapes, filters, numbers, strict=True))


def _filters_left(part: Channels, cut: Cut) -> Tensor:
    """Which of a tensor's filters are still there, in their order."""
    filters = part.filters
    if isinstance(filters, Slices) and filters.fold == 1:
        everything = torch.arange(part.shape[filters.axes[0]])
        return cut.index.get(filters.axes[0], everything)
    # In groups no channels change places: the filters' numbers, cut like the tensor, come out in order.
    numbers = torch.empty(part.shape)
    view = filters.split(numbers)
    like = filters.norms(view)
    view.copy_(filters.spread(torch.arange(float(like.numel())).view(like.shape)))
    left: Tensor = cut(numbers).unique().long()
    return left
