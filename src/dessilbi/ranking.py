"""The groups of a path in the order in which they are to be kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dessilbi.groups import Slices
from dessilbi.masks import elementwise, is_mask
from dessilbi.path import NEVER, Path
from dessilbi.track import ROWS


@dataclass
class Candidate:
    """The groups of one tensor, each a candidate."""

    name: str
    entry: Tensor
    magnitude: Tensor
    support: Tensor
    shaped: Callable[[Tensor], Tensor]
    whole: bool = False
    floor: int = 0
    joint: tuple[int, Tensor] | None = None

    @classmethod
    def of(cls, path: Path, name: str, index: int, level: str | None) -> Candidate:
        track = path.track(name)
        entry, magnitude = path.entry(name).flatten(), path.magnitude(name, index).flatten()
        support = path.support(name, index).flatten()
        entry[(entry == NEVER) | (entry > index)] = torch.iinfo(entry.dtype).max
        if track.kind == "weight":
            if level in ("filter", "layer") and len(track.shape) > 1:
                entry, magnitude, support = (_rows(x, track.filters, track.shape) for x in (entry, magnitude, support))
                return cls(name, entry.amin(1), magnitude.norm(dim=1), support.any(1), _as_it_is)
            return cls(name, entry, magnitude, support, lambda chosen: chosen.view(track.shape))
        if level == "weight":
            raise ValueError(
                f"level='weight': {name} is recorded by groups of kind {track.kind!r}, not weight by weight; leave "
                "level out, or record a run with param_groups(model, conv='weight', linear='weight') (dessilbi train "
                "--conv weight --linear weight)"
            )
        lie = track.cut or _KNOWN.get(track.kind)
        if lie is None or lie.count(track.shape) != track.groups:
            raise ValueError(
                f"{name} is recorded by groups of kind {track.kind!r}, and how they lie in the tensor is not in the "
                "path: take Selection.of(model, optimizer)"
            )
        if is_mask(lie, track.filters):
            return cls(name, entry, magnitude, support, _as_it_is, whole=lie.axes == (), joint=path.joint(name))
        return cls(name, entry, magnitude, support, lambda chosen: elementwise(chosen, lie, track.shape))

    @property
    def groups(self) -> int:
        return self.entry.numel()

    def topped_up(self) -> Tensor:
        """The support, and the best of the others where it is smaller than the bound."""
        missing = self.floor - int(self.support.sum())
        if missing <= 0:
            return self.support
        order = _order(self.entry, self.magnitude)
        chosen = self.support.clone()
        chosen[order[~self.support[order]][:missing]] = True
        return chosen


# How groups lie of which a file of the first version tells the kind only.
_KNOWN = {"filter": ROWS, "neuron": ROWS, "input": Slices((1,), kind="input"), "layer": Slices((), kind="layer")}


def units(candidates: Sequence[Candidate]) -> Tensor:
    """All groups in a row; for each the place of the first of those that are decided on together."""
    sizes = [c.groups for c in candidates]
    places = torch.arange(sum(sizes))
    families: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for c, mine in zip(candidates, places.split(sizes), strict=True):
        if c.joint is not None:
            families.setdefault(c.joint[0], []).append((c.joint[1], mine))
    units = places.clone()
    for members in families.values():
        numbers, where = (torch.cat(x) for x in zip(*members, strict=True))
        first = torch.full((int(numbers.max()) + 1,), len(places)).scatter_reduce_(0, numbers, where, "amin")
        units[where] = first[numbers]
    return units


def together(candidates: Sequence[Candidate], chosen: Sequence[Tensor]) -> Sequence[Tensor]:
    """Groups that span tensors are kept in all of them if they are in one."""
    shared, kept = units(candidates), torch.cat(list(chosen))
    any_of = torch.zeros_like(kept)
    any_of[shared[kept]] = True
    decided: Sequence[Tensor] = any_of[shared].split([c.groups for c in candidates])
    return decided


class Ranking:
    """All groups in one order; those that the bounds of their tensors demand are in whatever the order says.

    Groups that span tensors count once, and are in or out everywhere.
    """

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._sizes = [c.groups for c in candidates]
        shared = units(candidates)
        alone = shared == torch.arange(len(shared))
        self.total = int(alone.sum())
        order = _order(torch.cat([c.entry for c in candidates]), torch.cat([c.magnitude for c in candidates]))
        order = order[alone[order]]
        place = torch.empty_like(shared)
        place[order] = torch.arange(self.total)
        floors = [
            p <= p.kthvalue(c.floor).values if c.floor else torch.zeros_like(p, dtype=torch.bool)
            for c, p in zip(candidates, place[shared].split(self._sizes), strict=True)
        ]
        demanded = torch.cat([*together(candidates, floors)])
        self.least = int(demanded[alone].sum())
        turn = torch.empty_like(shared)
        turn[order] = (~demanded[order]).cumsum(0)
        self._turn = turn[shared]
        self._turn[demanded] = 0

    def first(self, count: int) -> Sequence[Tensor]:
        """The best so many, `least` ones at least: a decision for every group of every tensor."""
        chosen: Sequence[Tensor] = (self._turn <= count - self.least).split(self._sizes)
        return chosen


def _order(entry: Tensor, magnitude: Tensor) -> Tensor:
    """By entry, then by magnitude from the largest down, then as they come."""
    order = magnitude.argsort(descending=True, stable=True)
    return order[entry[order].argsort(stable=True)]


def _rows(values: Tensor, lie: Slices, shape: Sequence[int]) -> Tensor:
    """The elements of a tensor by filters: (filters, elements of each)."""
    view = lie.split(values.view(tuple(shape)))
    rest = [axis for axis in range(view.ndim) if axis not in lie.axes]
    return view.permute(*lie.axes, *rest).reshape(lie.count(shape), -1)


def _as_it_is(chosen: Tensor) -> Tensor:
    return chosen
