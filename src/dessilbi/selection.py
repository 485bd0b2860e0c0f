"""A selection: what is kept of a network, as masks by the names of its parameters, and how it is put into effect."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from dessilbi import files, sharding
from dessilbi.enforcement import MaskHandle
from dessilbi.masks import elementwise, following_norms, is_mask, shard, writers_of
from dessilbi.optim import DessiAdamW, DessiLBI
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
        params = named_tensors(model)
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
        params = named_tensors(model)
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


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {clean(name): p for name, p in _inner(model).named_parameters()}


def _some(named: Mapping[str, Tensor]) -> str:
    return f"it has {', '.join(list(named)[:5])}{', …' if len(named) > 5 else ''}"
