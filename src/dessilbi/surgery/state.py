"""What goes with parameters when their shapes change: the optimizer's state, and masks that are in force."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dessilbi.groups import Channels, Labels, Partition, Slices
from dessilbi.selection import MaskHandle, in_force
from dessilbi.surgery.plan import Cut


def carry_masks(old: nn.Module, new: nn.Module, cuts: Mapping[str, Cut], gone: Set[str]) -> None:
    """Put what is in force on the old network, cut alike, in force on the new one."""
    named = dict(new.named_parameters())
    pairs = []
    for name, p in old.named_parameters():
        mask = in_force(p)
        if mask is not None and name in named:
            left = cuts[name](mask) if name in cuts else mask
            if not left.all():
                pairs.append((named[name], left))
    if pairs:
        MaskHandle(pairs)


@torch.no_grad()
def move(optimizer: Optimizer, old: nn.Module, new: nn.Module, cuts: Mapping[str, Cut]) -> None:
    """Point an optimizer to the new parameters, its state cut alike; parameters that are gone are dropped.

    Nothing is changed if a parameter of the optimizer is not one of the network.
    """
    names = {id(p): name for name, p in old.named_parameters()}
    named = dict(new.named_parameters(remove_duplicate=False))
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) not in names:
                raise ValueError(
                    f"the optimizer has a parameter of shape {tuple(p.shape)} that is not the model's: make it with "
                    "the parameters of the model that is shrunk"
                )
    before = dict(optimizer.state)
    optimizer.state = defaultdict(dict)
    for group in optimizer.param_groups:
        stays = [i for i, p in enumerate(group["params"]) if names[id(p)] in named]
        olds = [group["params"][i] for i in stays]
        if "group" in group:
            group["group"] = _partitions(group["group"], olds, stays, names, named, cuts)
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
        if any(isinstance(part, Channels) for part in mine):
            return _joined(mine, olds, names, named, cuts)
        return [
            _partition(part, cuts.get(names[id(p)]), named[names[id(p)]]) for part, p in zip(mine, olds, strict=True)
        ]
    if isinstance(group, Partition) and olds:
        return _partition(group, cuts.get(names[id(olds[0])]), named[names[id(olds[0])]])
    return group


def _partition(part: Any, cut: Cut | None, new: Tensor) -> Any:
    if isinstance(part, Labels) and cut is not None:
        return Labels(torch.unique(cut(part.index), return_inverse=True)[1])
    if isinstance(part, Slices) and part.fold > 1 and cut is not None and cut.columns is None:
        raise ValueError(f"a group of kind {part.kind!r} over {part.fold} convolution groups cannot be cut along")
    return part


def _joined(
    parts: list[Any], olds: list[Tensor], names: Mapping[int, str], named: Mapping[str, Tensor],
    cuts: Mapping[str, Cut],
) -> list[Any]:  # fmt: skip
    from dessilbi.groups import channels

    members = []
    for part, p in zip(parts, olds, strict=True):
        cut, new = cuts.get(names[id(p)]), named[names[id(p)]]
        axis = part.filters.axes[0]
        index = part.index if cut is None or axis not in cut.index else part.index[cut.index[axis]]
        members.append((new.shape, part.filters, index))
    numbers = torch.unique(torch.cat([index for _, _, index in members]), return_inverse=True)[1]
    split = numbers.split([len(index) for _, _, index in members])
    return list(channels([(s, f, i) for (s, f, _), i in zip(members, split, strict=True)]))
