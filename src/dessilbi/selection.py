"""A selection: what is kept of a network, as masks by the names of its parameters, and how it is put into effect."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from dessilbi import files, sharding
from dessilbi.enforcement import MaskHandle
from dessilbi.masks import elementwise, following_norms, is_mask, shard, writers_of
from dessilbi.optim import DessiAdamW, DessiLBI
from dessilbi.path import Path
from dessilbi.ranking import Candidate, Ranking, together
from dessilbi.track import ROWS, cut, filters
from dessilbi.wrappers import clean, unwrap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEVELS = ("weight", "filter", "layer")

_VERSION = 1


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
        names, lies = {id(p): clean(name) for name, p in inner.named_parameters()}, filters(inner)
        masks = {}
        for p, part in optimizer.penalised():
            if id(p) not in names:
                raise ValueError(f"the optimizer's parameter of shape {tuple(p.shape)} is not a parameter of the model")
            support = sharding.whole(optimizer.support(p))
            lie = cut(part) or part
            if part.kind != "weight" and not is_mask(lie, lies.get(id(p), ROWS)):
                support = elementwise(support, lie, p.shape)
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

    def plot(self) -> Figure:
        """The fraction of groups kept, by tensor: a figure that notebooks show. Needs matplotlib (dessilbi[plot])."""
        from dessilbi.report.figures import selection_figure

        return selection_figure(self)

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
        named = {clean(name): p for name, p in inner.named_parameters(remove_duplicate=False)}
        names = {id(p): clean(name) for name, p in inner.named_parameters()}
        writers, norms, lies = writers_of(inner), following_norms(inner), filters(inner)
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
            add(p, elementwise(mask, lie, p.shape) if p.ndim > 1 else mask)
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
            (sharding.local(params[name].detach()), shard(mask, params[name]))
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
        files.save_arrays(file, "selection", _VERSION, *self.packed())

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> Selection:
        """Read a selection."""
        arrays, header = files.load_arrays(file, "selection", _VERSION)
        try:
            return cls.unpacked(arrays, header)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{os.fspath(file)}: damaged selection file ({error})") from None

    def packed(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Arrays and plain data that `unpacked` makes the selection of: for files that hold one."""
        masks = [*self.items(), *self._along.items()]
        arrays = {f"{i}": np.packbits(mask.cpu().numpy().ravel()) for i, (_, mask) in enumerate(masks)}
        tensors = [{"name": name, "shape": list(mask.shape)} for name, mask in masks]
        return arrays, {"level": self.level, "source": self._source, "tensors": tensors, "along": len(self._along)}

    @classmethod
    def unpacked(cls, arrays: Mapping[str, np.ndarray], header: Mapping[str, Any]) -> Selection:
        """The selection of `packed`; raises a KeyError, TypeError or ValueError where it is not one."""
        masks = [(t["name"], _unpack(arrays[f"{i}"], t["shape"])) for i, t in enumerate(header["tensors"])]
        own = len(masks) - int(header.get("along", 0))
        if len(dict(masks[:own])) != own:
            raise ValueError("a name appears twice")
        return cls(dict(masks[:own]), header["level"], header["source"], dict(masks[own:]))


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


# -- masks -------------------------------------------------------------------------------------------------------


def _level(masks: Mapping[str, Tensor]) -> str:
    if masks and all(mask.numel() == 1 and mask.ndim <= 1 for mask in masks.values()):
        return "layer"
    return "weight" if all(mask.ndim > 1 for mask in masks.values()) else "filter"


def _unpack(packed: np.ndarray, shape: list[int]) -> Tensor:
    if not all(isinstance(n, int) and n >= 0 for n in shape) or packed.dtype != np.uint8:
        raise ValueError(f"a mask of shape {shape}")
    count = math.prod(shape)
    if packed.size != (count + 7) // 8:
        raise ValueError(f"{packed.size} bytes for a mask of shape {shape}")
    return torch.from_numpy(np.unpackbits(packed, count=count).astype(bool)).view(shape)


# -- the model ---------------------------------------------------------------------------------------------------


def _inner(model: nn.Module) -> nn.Module:
    """The user's module, with its parameters in their places: FSDP2 leaves those of the root gathered after a pass."""
    model = unwrap(model)
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules() if fsdp is not None else ():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()
    return model


def _named(model: nn.Module) -> dict[str, Tensor]:
    return {clean(name): p for name, p in _inner(model).named_parameters()}


def _some(named: Mapping[str, Tensor]) -> str:
    return f"it has {', '.join(list(named)[:5])}{', …' if len(named) > 5 else ''}"
