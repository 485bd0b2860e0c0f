"""The groups of a path in the order in which they are to be kept, and how many of them a target allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Protocol

import torch
from torch import Tensor

from dessilbi.groups import Slices
from dessilbi.masks import elementwise, is_mask
from dessilbi.path import NEVER, Path
from dessilbi.selection import LEVELS, Selection
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
        order = ranked(self.entry, self.magnitude)
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
        order = ranked(torch.cat([c.entry for c in candidates]), torch.cat([c.magnitude for c in candidates]))
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


def ranked(entry: Tensor, magnitude: Tensor) -> Tensor:
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


# -- what of them is selected -----------------------------------------------------------------------------------------


class Cost(Protocol):
    """What the network that a selection leaves would cost: a profile of the model answers."""

    def parameters_of(self, sel: Selection) -> int: ...

    def macs_of(self, sel: Selection) -> int: ...

    def latency_of(self, sel: Selection) -> float: ...


def select(
    path: Path,
    at: int = -1,
    *,
    keep: float | None = None,
    params: float | None = None,
    macs: float | None = None,
    latency: float | None = None,
    max_prune: float | None = None,
    min_keep: int = 1,
    level: str | None = None,
    cost: Cost | None = None,
) -> Selection:
    """Read a selection off a path: the support at a recorded point, or as much as a target allows.

    For a target, all groups of all tensors are ranked: first those that entered the support first; ties, and groups
    that never entered, by their ‖V_g‖. The selection is the longest beginning of this ranking that meets the target.

    Args:
        path: the record of a run.
        at: an index into `path.points`. Without a target the selection is the support there; with one, the path is
            read up to there. (|V| of single weights is known at the last point only, and taken from there.)
        keep: the fraction of groups to keep at most; a group that spans tensors counts once.
        params, macs, latency: the most that the network may have and take when what is out has been removed:
            parameters, multiply-adds, seconds, as `cost` counts them.
        max_prune: the most that a tensor may lose: a fraction of its groups.
        min_keep: the least number of groups that a tensor keeps. It does not hold where whole layers are selected: at
            level "layer", and for tensors recorded as whole layers.
        level: None, as recorded; "weight"; "filter", where a filter of single weights is kept if any of them is, and
            ranks by the first of them to enter; or "layer": filters, of which none need be left.
        cost: what the budgets `params`, `macs` and `latency` are measured with: `profile(model, example_inputs)`.
    """
    targets = {"keep": keep, "params": params, "macs": macs, "latency": latency}
    given = {name: value for name, value in targets.items() if value is not None}
    _check(given, max_prune, min_keep, level, cost)
    index = path.index(at)
    candidates = [Candidate.of(path, name, index, level) for name in path.names]
    for c in candidates:
        least = 0 if level == "layer" or c.whole else min_keep
        if max_prune is not None:
            least = max(least, math.ceil((1 - max_prune) * c.groups - 1e-9))
        c.floor = min(least, c.groups)
    bounds = {"max_prune": max_prune, "min_keep": min_keep, "level": level}
    told = {name: value for name, value in (given | bounds).items() if value is not None}
    point = path.points[index]
    source = {"from": "path", "at": index, "point": point["point"], "time": point["time"], **told}

    def selection(chosen: Sequence[Tensor]) -> Selection:
        masks = {c.name: c.shaped(x) for c, x in zip(candidates, chosen, strict=True)}
        return Selection(masks, level, source)

    if not given:
        return selection(together(candidates, [c.topped_up() for c in candidates]))
    ((name, target),) = given.items()
    ranking = Ranking(candidates)
    low, high = ranking.least, ranking.total
    if name == "keep":
        count = int(target * high + 1e-6)
        if count < low:
            raise _unreachable(name, target, low / high, min_keep, max_prune)
        return selection(ranking.first(count))
    assert cost is not None
    measure = {"params": cost.parameters_of, "macs": cost.macs_of, "latency": cost.latency_of}[name]
    everything, best = selection(ranking.first(high)), selection(ranking.first(low))
    if measure(everything) <= target:
        return everything
    if (cheapest := measure(best)) > target:
        raise _unreachable(name, target, cheapest, min_keep, max_prune)
    while high - low > 1:
        middle = (low + high) // 2
        tried = selection(ranking.first(middle))
        if measure(tried) <= target:
            low, best = middle, tried
        else:
            high = middle
    return best


def _unreachable(name: str, target: float, least: float, min_keep: int, max_prune: float | None) -> ValueError:
    bounds = f"min_keep={min_keep}" + ("" if max_prune is None else f" and max_prune={max_prune:g}")
    return ValueError(f"{name}={target:.10g} cannot be reached: with {bounds} the least is {least:.10g}")


def _check(
    given: Mapping[str, float], max_prune: float | None, min_keep: int, level: str | None, cost: Cost | None
) -> None:
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are {len(given)} targets: give one of them")
    for name, value in {**given, **({} if max_prune is None else {"max_prune": max_prune})}.items():
        if not isinstance(value, Real) or isinstance(value, bool):
            raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
        if name in ("keep", "max_prune") and not 0 <= value <= 1:
            raise ValueError(f"{name} must be a fraction from 0 to 1, got {value!r}")
        if not value >= 0:
            raise ValueError(f"{name} must be a number ≥ 0, got {value!r}")
    if not isinstance(min_keep, int) or isinstance(min_keep, bool) or min_keep < 0:
        raise ValueError(f"min_keep must be a whole number ≥ 0, got {min_keep!r}")
    if level not in (None, *LEVELS):
        raise ValueError(f"level must be one of {', '.join(LEVELS)} or None, got {level!r}")
    if given and "keep" not in given and cost is None:
        raise ValueError(f"{next(iter(given))}={next(iter(given.values()))!r} needs something that counts: "
                         "pass cost=profile(model, example_inputs)")  # fmt: skip
