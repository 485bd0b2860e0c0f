"""A selection: what is kept of a network, as masks by the names of its parameters, and how it is put into effect."""

from __future__ import annotations

import json
import math
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from dessilbi import files, sharding
from dessilbi.groups import Partition, Slices
from dessilbi.optim import DessiAdamW, DessiLBI
from dessilbi.path import NEVER, ROWS, Path, _clean, _unwrap, cut, filters

LEVELS = ("weight", "filter", "layer")

_VERSION = 1
_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm, nn.GroupNorm)
_WRITERS = (nn.modules.conv._ConvNd, nn.Linear)


class Selection(Mapping[str, Tensor]):
    """What is kept of a network: a mask for every tensor that is selected from.

    Args:
        masks: by the name of the parameter a bool tensor, True where it is kept: of the parameter's shape; or 1-D with
            one entry a filter or neuron (output channel), also of transposed and grouped convolutions; or one entry
            for the whole tensor.
        level: "weight", "filter" or "layer"; by default what the masks look like.
        source: where the selection comes from; plain data that goes into the file.
        along: masks, of the parameter's shape, of what goes with the selected: normalisations that `masks` does not
            find by itself. :func:`dessilbi.complete` finds them.

    Example:
        >>> sel = Selection({"conv1.weight": torch.tensor([True, False, True])})
        >>> with sel.applied(model):
        ...     evaluate(model)
    """

    def __init__(
        self,
        masks: Mapping[str, Tensor],
        level: str | None = None,
        source: Mapping[str, Any] | None = None,
        along: Mapping[str, Tensor] | None = None,
    ) -> None:
        for name, mask in [*masks.items(), *(along or {}).items()]:
            if not isinstance(name, str):
                raise TypeError(f"masks are named by the parameter's name, got {name!r} ({type(name).__name__})")
            if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
                given = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
                raise TypeError(f"the mask of {name} must be a bool tensor, got {given}: write `mask != 0`")
        if level not in (None, *LEVELS):
            raise ValueError(f"level must be one of {', '.join(LEVELS)} or None, got {level!r}")
        self._masks = {name: mask.detach().clone() for name, mask in masks.items()}
        self._along = {name: mask.detach().clone() for name, mask in (along or {}).items()}
        self._level = level or _level(self._masks)
        try:
            self._source: dict[str, Any] = json.loads(json.dumps(dict(source or {})))
        except (TypeError, ValueError) as error:
            raise TypeError(f"source must be plain JSON data: {error}") from None

    @classmethod
    def of(cls, model: nn.Module, optimizer: DessiLBI | DessiAdamW) -> Selection:
        """The support of Γ now. Of sharded parameters all processes must ask: the masks are whole."""
        inner = _inner(model)
        names, lies = {id(p): _clean(name) for name, p in inner.named_parameters()}, filters(inner)
        masks = {}
        for p, part in optimizer.penalised():
            if id(p) not in names:
                raise ValueError(f"the optimizer's parameter of shape {tuple(p.shape)} is not a parameter of the model")
            support = sharding.whole(optimizer.support(p))
            lie = cut(part) or part
            if part.kind != "weight" and not _is_mask(lie, lies.get(id(p), ROWS)):
                support = _elementwise(support, lie, p.shape)
            masks[names[id(p)]] = support
        return cls(masks, source={"from": "optimizer", "time": optimizer.time})

    # -- what it says --------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Tensor:
        return self._masks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._masks)

    def __len__(self) -> int:
        return len(self._masks)

    # A mapping compares values, and tensors do not compare to one bool.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"Selection(level={self.level!r}, {len(self)} tensors, keep={self.keep:.4g})"

    @property
    def level(self) -> str:
        """What is selected: "weight", "filter" or "layer"."""
        return self._level

    @property
    def source(self) -> dict[str, Any]:
        """Where the selection comes from."""
        return dict(self._source)

    @property
    def along(self) -> dict[str, Tensor]:
        """What goes with the selected; it does not count."""
        return dict(self._along)

    @property
    def keep(self) -> float:
        """The fraction of groups kept, of all tensors together."""
        total = sum(mask.numel() for mask in self.values())
        return sum(int(mask.sum()) for mask in self.values()) / total if total else 1.0

    def per_layer(self) -> dict[str, float]:
        """The fraction of groups kept, by tensor."""
        return {name: int(mask.sum()) / max(1, mask.numel()) for name, mask in self.items()}

    # -- what it does --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def masks(self, model: nn.Module) -> dict[str, Tensor]:
        """The elementwise mask of every parameter of the model that the selection makes zero, on its device.

        A filter, neuron or layer that is out is zero altogether: its weights, its bias, and the scale and shift of the
        normalisation that follows. That normalisation is the next one among the children of the same module, before
        any other convolution or linear layer, if it has as many channels. So it is found in all networks of
        :mod:`dessilbi.models`; in a network that orders its modules otherwise the weight and bias are masked and the
        normalisation is left alone, and the channel is then a constant, not absent.
        """
        inner = _inner(model)
        named = {_clean(name): p for name, p in inner.named_parameters(remove_duplicate=False)}
        names = {id(p): _clean(name) for name, p in inner.named_parameters()}
        writers, norms, lies = _writers(inner), _following_norms(inner), filters(inner)
        found: dict[str, Tensor] = {}

        def add(p: Any, mask: Tensor) -> None:
            if p is not None:
                name = names[id(p)]
                found[name] = found[name] & mask if name in found else mask

        for name, mask in [*self.items(), *self._along.items()]:
            if name not in named:
                raise ValueError(f"the selection names {name!r}, which is no parameter of the model; {_some(named)}")
            p, mask = named[name], mask.to(named[name].device)
            if mask.shape == p.shape:
                add(p, mask)
                continue
            lie = lies.get(id(p), ROWS)
            if mask.numel() == 1 and mask.ndim <= 1:
                mask = mask.view(()).expand(lie.count(p.shape) if p.ndim > 1 else p.shape)
            elif mask.ndim != 1 or p.ndim < 2 or mask.numel() != lie.count(p.shape):
                entries = f" or ({lie.count(p.shape)},), one entry a filter" if p.ndim > 1 else ""
                raise ValueError(
                    f"the mask of {name} has shape {tuple(mask.shape)}, expected is {tuple(p.shape)}{entries}"
                )
            add(p, _elementwise(mask, lie, p.shape) if p.ndim > 1 else mask)
            for writer, bias in writers.get(id(p), ()):
                norm = norms.get(id(writer))
                for follower in (bias, *((norm.weight, norm.bias) if norm is not None else ())):
                    add(follower, mask)
        return found

    @torch.no_grad()
    def apply(self, model: nn.Module) -> MaskHandle:
        """Zero what is out, and again after every step of any optimizer that moves it, until `handle.remove()`.

        Parameters keep their names, identities and addresses; one multiplication in place follows each step. The
        optimizer may be made before or after. `with sel.apply(model):` ends it with the block, where the weights stay
        as they are.
        """
        params = _named(model)
        for name, p in params.items():
            if sharding.is_sharded(p):
                raise ValueError(
                    f"apply: {name} is sharded over ranks (DTensor); use `with sel.applied(model):` to evaluate, "
                    "or train with DistributedDataParallel"
                )
        pairs = [(params[name], mask) for name, mask in self.masks(model).items()]
        for p, mask in pairs:
            p.masked_fill_(~mask, 0)
        return MaskHandle(pairs)

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Inside the `with`, what is out is zero; afterwards every parameter has the bits it had, also after an error.

        Parameters keep their addresses, so that a CUDA graph that holds them stays valid. Sharded parameters will do.
        """
        params = _named(model)
        pairs = [
            (sharding.local(params[name].detach()), _shard(mask, params[name]))
            for name, mask in self.masks(model).items()
        ]
        saved = [p.clone() for p, _ in pairs]
        try:
            with torch.no_grad():
                for p, mask in pairs:
                    p.masked_fill_(~mask, 0)
            yield
        finally:
            _inner(model)  # what was gathered inside is masked
            with torch.no_grad():
                for (p, _), value in zip(pairs, saved, strict=True):
                    p.copy_(value)

    # -- files ---------------------------------------------------------------------------------------------------

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the selection, a bit an entry; an old file is replaced only when all is on disk."""
        masks = [*self.items(), *self._along.items()]
        arrays = {f"{i}": np.packbits(mask.cpu().numpy().ravel()) for i, (_, mask) in enumerate(masks)}
        tensors = [{"name": name, "shape": list(mask.shape)} for name, mask in masks]
        header = {"level": self.level, "source": self._source, "tensors": tensors, "along": len(self._along)}
        files.save_arrays(file, "selection", _VERSION, arrays, header)

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> Selection:
        """Read a selection."""
        arrays, header = files.load_arrays(file, "selection", _VERSION)
        try:
            masks = [(t["name"], _unpack(arrays[f"{i}"], t["shape"])) for i, t in enumerate(header["tensors"])]
            own = len(masks) - int(header.get("along", 0))
            if len(dict(masks[:own])) != own:
                raise ValueError("a name appears twice")
            return cls(dict(masks[:own]), header["level"], header["source"], dict(masks[own:]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{os.fspath(file)}: damaged selection file ({error})") from None


class MaskHandle:
    """Keeps what a selection took out at zero until `remove()`, or the end of its `with`."""

    def __init__(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        # As wide as the parameter and laid out like it, which is what makes the multiplication one launch.
        self._masks = {id(p): torch.empty_like(p, requires_grad=False).copy_(mask) for p, mask in pairs}
        self._alive = {id(p): weakref.ref(p, partial(self._forget, id(p))) for p, _ in pairs}
        self._own: weakref.WeakKeyDictionary[Optimizer, _Own] = weakref.WeakKeyDictionary()
        self._hook = register_optimizer_step_post_hook(self._after_step)
        _HANDLES.add(self)

    def mask(self, p: Tensor) -> Tensor | None:
        """What of a parameter is kept, if it is one of those."""
        alive = self._alive.get(id(p))
        return self._masks[id(p)] != 0 if alive is not None and alive() is p else None

    def remove(self) -> None:
        """End it; the weights stay as they are and may move again."""
        self._hook.remove()
        self._masks.clear()
        self._alive.clear()
        self._own.clear()

    def __enter__(self) -> MaskHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        own = self._own.get(optimizer)
        if own is None or own.is_stale(optimizer):
            own = self._own[optimizer] = _Own(optimizer, self._alive, self._masks)
        for params, masks in own.batches:
            torch._foreach_mul_(params, masks)

    def _forget(self, key: int, _: object) -> None:
        self._masks.pop(key, None)
        self._alive.pop(key, None)
        if not self._alive:
            self.remove()


_HANDLES: weakref.WeakSet[MaskHandle] = weakref.WeakSet()


def in_force(p: Tensor) -> Tensor | None:
    """What the selections that are applied to a parameter keep of it, together; None where there is none."""
    masks = [mask for handle in _HANDLES if (mask := handle.mask(p)) is not None]
    return torch.stack(masks).all(0) if masks else None


class _Own:
    """What of a selection one optimizer moves, as lists of one device and dtype."""

    def __init__(self, optimizer: Optimizer, alive: dict[int, weakref.ref[Tensor]], masks: dict[int, Tensor]) -> None:
        self.count = _count(optimizer)
        sorted_by: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        every: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        for p in every:
            if id(p) in alive and alive[id(p)]() is p:
                mask = masks[id(p)] = masks[id(p)].to(p)  # the model may have been moved since
                params, theirs = sorted_by.setdefault((p.device, p.dtype), ([], []))
                params.append(p)
                theirs.append(mask)
        self.batches = list(sorted_by.values())

    def is_stale(self, optimizer: Optimizer) -> bool:
        return self.count != _count(optimizer) or any(
            params[0].device != masks[0].device or params[0].dtype != masks[0].dtype for params, masks in self.batches
        )


def _count(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


# -- from a path -------------------------------------------------------------------------------------------------


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
    index = path._index(at)
    candidates = [_Candidate.of(path, name, index, level) for name in path.names]
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
        return selection(_together(candidates, [c.topped_up() for c in candidates]))
    ((name, target),) = given.items()
    ranking = _Ranking(candidates)
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


@dataclass
class _Candidate:
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
    def of(cls, path: Path, name: str, index: int, level: str | None) -> _Candidate:
        track = path._track(name)
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
                "level out, or record a run with param_groups(model, conv='weight', linear='weight')"
            )
        lie = track.cut or _KNOWN.get(track.kind)
        if lie is None or lie.count(track.shape) != track.groups:
            raise ValueError(
                f"{name} is recorded by groups of kind {track.kind!r}, and how they lie in the tensor is not in the "
                "path: take Selection.of(model, optimizer)"
            )
        if _is_mask(lie, track.filters):
            return cls(name, entry, magnitude, support, _as_it_is, whole=lie.axes == (), joint=path.joint(name))
        return cls(name, entry, magnitude, support, lambda chosen: _elementwise(chosen, lie, track.shape))

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


def _units(candidates: Sequence[_Candidate]) -> Tensor:
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


def _together(candidates: Sequence[_Candidate], chosen: Sequence[Tensor]) -> Sequence[Tensor]:
    """Groups that span tensors are kept in all of them if they are in one."""
    units, kept = _units(candidates), torch.cat(list(chosen))
    any_of = torch.zeros_like(kept)
    any_of[units[kept]] = True
    together: Sequence[Tensor] = any_of[units].split([c.groups for c in candidates])
    return together


class _Ranking:
    """All groups in one order; those that the bounds of their tensors demand are in whatever the order says.

    Groups that span tensors count once, and are in or out everywhere.
    """

    def __init__(self, candidates: Sequence[_Candidate]) -> None:
        self._sizes = [c.groups for c in candidates]
        units = _units(candidates)
        alone = units == torch.arange(len(units))
        self.total = int(alone.sum())
        order = _order(torch.cat([c.entry for c in candidates]), torch.cat([c.magnitude for c in candidates]))
        order = order[alone[order]]
        place = torch.empty_like(units)
        place[order] = torch.arange(self.total)
        floors = [
            p <= p.kthvalue(c.floor).values if c.floor else torch.zeros_like(p, dtype=torch.bool)
            for c, p in zip(candidates, place[units].split(self._sizes), strict=True)
        ]
        demanded = torch.cat([*_together(candidates, floors)])
        self.least = int(demanded[alone].sum())
        turn = torch.empty_like(units)
        turn[order] = (~demanded[order]).cumsum(0)
        self._turn = turn[units]
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


# -- masks -------------------------------------------------------------------------------------------------------


def _level(masks: Mapping[str, Tensor]) -> str:
    if masks and all(mask.numel() == 1 and mask.ndim <= 1 for mask in masks.values()):
        return "layer"
    return "weight" if all(mask.ndim > 1 for mask in masks.values()) else "filter"


def _elementwise(decisions: Tensor, part: Partition, shape: Sequence[int]) -> Tensor:
    """One decision a group, spread over the elements of the tensor."""
    mask = torch.empty(tuple(shape), dtype=torch.bool, device=decisions.device)
    view = part.split(mask)
    if isinstance(part, Slices):
        decisions = decisions.view([n if axis in part.axes else 1 for axis, n in enumerate(view.shape)])
    view.copy_(part.spread(decisions))
    return mask


def _is_mask(part: Partition, lie: Slices) -> bool:
    """Whether one decision a group is a mask as it is: one a filter, or one in all."""
    return isinstance(part, Slices) and (part.axes == () or (part.axes, part.fold) == (lie.axes, lie.fold))


def _unpack(packed: np.ndarray, shape: list[int]) -> Tensor:
    if not all(isinstance(n, int) and n >= 0 for n in shape) or packed.dtype != np.uint8:
        raise ValueError(f"a mask of shape {shape}")
    count = math.prod(shape)
    if packed.size != (count + 7) // 8:
        raise ValueError(f"{packed.size} bytes for a mask of shape {shape}")
    return torch.from_numpy(np.unpackbits(packed, count=count).astype(bool)).view(shape)


def _shard(mask: Tensor, p: Tensor) -> Tensor:
    """This rank's part of a mask."""
    if not sharding.is_sharded(p):
        return mask
    from torch.distributed.tensor import distribute_tensor

    # Every rank has the whole mask: no communication.
    local: Tensor = distribute_tensor(mask, p.device_mesh, p.placements, src_data_rank=None).to_local()  # type: ignore[attr-defined]
    return local


# -- the model ---------------------------------------------------------------------------------------------------


def _inner(model: nn.Module) -> nn.Module:
    """The user's module, with its parameters in their places: FSDP2 leaves those of the root gathered after a pass."""
    model = _unwrap(model)
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules() if fsdp is not None else ():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()
    return model


def _named(model: nn.Module) -> dict[str, Tensor]:
    return {_clean(name): p for name, p in _inner(model).named_parameters()}


def _some(named: Mapping[str, Tensor]) -> str:
    return f"it has {', '.join(list(named)[:5])}{', …' if len(named) > 5 else ''}"


def _writers(model: nn.Module) -> dict[int, list[tuple[nn.Module, Any]]]:
    """The modules that write channels, and their biases, by their weights."""
    found: dict[int, list[tuple[nn.Module, Any]]] = {}
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention) or type(module).__name__ == "HeadAttention":
            weight, bias = module._parameters["in_proj_weight"], module._parameters["in_proj_bias"]
        elif isinstance(module, _WRITERS):
            weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
        else:
            continue
        if weight is not None:
            found.setdefault(id(weight), []).append((module, bias))
    return found


def _following_norms(model: nn.Module) -> dict[int, nn.Module]:
    """For every convolution and linear layer that has one, the normalisation of its output."""
    found: dict[int, nn.Module] = {}
    for parent in model.modules():
        writer: nn.Module | None = None
        for child in parent.children():
            if isinstance(child, _WRITERS):
                writer = child
            elif isinstance(child, _NORMS) and writer is not None:
                if _normalised(child) == _channels(writer) and child.weight is not None:
                    found[id(writer)] = child
                writer = None
    return found


def _channels(module: nn.Module) -> int:
    return int(module.out_features if isinstance(module, nn.Linear) else module.out_channels)  # type: ignore[arg-type]


def _normalised(module: nn.Module) -> int:
    return int(module.num_channels if isinstance(module, nn.GroupNorm) else module.num_features)  # type: ignore[arg-type]
