"""A selection: what is kept of a network, as masks by the names of its parameters, and how it is put into effect."""

from __future__ import annotations

import json
import math
import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from dessilbi import files, sharding
from dessilbi.groups import Elements, Partition, Slices, transposed_filters
from dessilbi.optim import DessiAdamW, DessiLBI
from dessilbi.path import _clean, _unwrap

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

    Example:
        >>> sel = Selection({"conv1.weight": torch.tensor([True, False, True])})
        >>> with sel.applied(model):
        ...     evaluate(model)
    """

    def __init__(
        self, masks: Mapping[str, Tensor], level: str | None = None, source: Mapping[str, Any] | None = None
    ) -> None:
        for name, mask in masks.items():
            if not isinstance(name, str):
                raise TypeError(f"masks are named by the parameter's name, got {name!r} ({type(name).__name__})")
            if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
                given = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
                raise TypeError(f"the mask of {name} must be a bool tensor, got {given}: write `mask != 0`")
        if level not in (None, *LEVELS):
            raise ValueError(f"level must be one of {', '.join(LEVELS)} or None, got {level!r}")
        self._masks = {name: mask.detach().clone() for name, mask in masks.items()}
        self._level = level or _level(self._masks)
        try:
            self._source: dict[str, Any] = json.loads(json.dumps(dict(source or {}), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise TypeError(f"source must be plain JSON data: {error}") from None

    @classmethod
    def of(cls, model: nn.Module, optimizer: DessiLBI | DessiAdamW) -> Selection:
        """The support of Γ now. Of sharded parameters all processes must ask: the masks are whole."""
        inner = _inner(model)
        names, lies = {id(p): _clean(name) for name, p in inner.named_parameters()}, _filters(inner)
        masks = {}
        for p, part in optimizer.penalised():
            if id(p) not in names:
                raise ValueError(f"the optimizer's parameter of shape {tuple(p.shape)} is not a parameter of the model")
            support = sharding.whole(optimizer.support(p))
            if not _is_outward(part, lies.get(id(p), _ROWS)):
                support = _elementwise(support, part, p.shape)
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
        writers, norms, lies = _writers(inner), _following_norms(inner), _filters(inner)
        found: dict[str, Tensor] = {}

        def add(p: Any, mask: Tensor) -> None:
            if p is not None:
                name = names[id(p)]
                found[name] = found[name] & mask if name in found else mask

        for name, mask in self.items():
            if name not in named:
                raise ValueError(f"the selection names {name!r}, which is no parameter of the model; {_some(named)}")
            p, mask = named[name], mask.to(named[name].device)
            if mask.shape == p.shape:
                add(p, mask)
                continue
            lie = lies.get(id(p), _ROWS)
            if mask.numel() == 1 and mask.ndim <= 1:
                mask = mask.view(()).expand(lie.count(p.shape) if p.ndim > 1 else p.shape)
            elif mask.ndim != 1 or p.ndim < 2 or mask.numel() != lie.count(p.shape):
                entries = f" or ({lie.count(p.shape)},), one entry a filter" if p.ndim > 1 else ""
                raise ValueError(
                    f"the mask of {name} has shape {tuple(mask.shape)}, expected is {tuple(p.shape)}{entries}"
                )
            add(p, _elementwise(mask, lie, p.shape) if p.ndim > 1 else mask)
            for writer in writers.get(id(p), ()):
                norm = norms.get(id(writer))
                for follower in (writer.bias, *((norm.weight, norm.bias) if norm is not None else ())):
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
            with torch.no_grad():
                for (p, _), value in zip(pairs, saved, strict=True):
                    p.copy_(value)

    # -- files ---------------------------------------------------------------------------------------------------

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the selection, a bit an entry; an old file is replaced only when all is on disk."""
        arrays = {f"{i}": np.packbits(mask.cpu().numpy().ravel()) for i, mask in enumerate(self.values())}
        tensors = [{"name": name, "shape": list(mask.shape)} for name, mask in self.items()]
        header = {"level": self.level, "source": self._source, "tensors": tensors}
        files.save_arrays(file, "selection", _VERSION, arrays, header)

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> Selection:
        """Read a selection."""
        arrays, header = files.load_arrays(file, "selection", _VERSION)
        try:
            masks = {t["name"]: _unpack(arrays[f"{i}"], t["shape"]) for i, t in enumerate(header["tensors"])}
            if len(masks) != len(header["tensors"]):
                raise ValueError("a name appears twice")
            return cls(masks, header["level"], header["source"])
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


# -- masks -------------------------------------------------------------------------------------------------------

_ROWS = Slices((0,), kind="filter")


def _level(masks: Mapping[str, Tensor]) -> str:
    if masks and all(mask.numel() == 1 and mask.ndim <= 1 for mask in masks.values()):
        return "layer"
    return "weight" if all(mask.ndim > 1 for mask in masks.values()) else "filter"


def _elementwise(decisions: Tensor, part: Partition, shape: torch.Size) -> Tensor:
    """One decision a group, spread over the elements of the tensor."""
    if isinstance(part, Elements):
        return decisions
    mask = torch.empty(shape, dtype=torch.bool, device=decisions.device)
    view = part.split(mask)
    if isinstance(part, Slices):
        decisions = decisions.view([n if axis in part.axes else 1 for axis, n in enumerate(view.shape)])
    view.copy_(part.spread(decisions))
    return mask


def _is_outward(part: Partition, lie: Slices) -> bool:
    """Whether the groups' decisions are a mask as they are: one an element, an output channel, or in all."""
    if isinstance(part, Slices):
        return part.axes == () or (part.axes, part.fold) == (lie.axes, lie.fold)
    return part.kind in ("weight", "channel")


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


def _writers(model: nn.Module) -> dict[int, list[nn.Module]]:
    """The convolutions and linear layers by their weights."""
    found: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if name == "weight" and isinstance(module, _WRITERS):
                found.setdefault(id(p), []).append(module)
    return found


def _filters(model: nn.Module) -> dict[int, Slices]:
    """How the filters lie in the weights where it is not along the first axis."""
    transposed = nn.modules.conv._ConvTransposeNd
    return {key: transposed_filters(m.groups) for key, (m, *_) in _writers(model).items() if isinstance(m, transposed)}


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
