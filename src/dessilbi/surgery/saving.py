"""Shrunk networks as files: the original constructor, the sizes that differ from it, and the weights. No code.

A file lists, for every module, its type and the whole numbers it keeps about its sizes. To load it the dense network is
made by its constructor, and every module that differs is given the file's numbers and weights; the few modules that
surgery puts in are made from a list of names known here. Whatever else differs is another network, and refused.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dessilbi import files
from dessilbi.surgery.attention import HeadAttention
from dessilbi.surgery.resize import Rearranged
from dessilbi.surgery.transition import Transition

_KIND, _VERSION = "network", 1
# What NumPy has no type for travels as integers of the same width.
_AS_INTEGERS = {torch.bfloat16: torch.int16}


def _heads(old: nn.Module | None, heads: Sequence[int]) -> nn.Module:
    if not isinstance(old, nn.MultiheadAttention):
        raise ValueError(f"the file has attention heads where the network has a {type(old).__name__}")
    return HeadAttention.of(old, heads)


# What surgery puts in a module's place.
_MADE: dict[str, Callable[[nn.Module | None, Mapping[str, Any]], nn.Module]] = {
    "Identity": lambda old, numbers: nn.Identity(),
    "ReLU": lambda old, numbers: nn.ReLU(),
    "Sequential": lambda old, numbers: nn.Sequential(OrderedDict(old.named_children() if old else ())),
    "Transition": lambda old, numbers: Transition(numbers["new_channels"], numbers["stride"], numbers["crop"]),
    "HeadAttention": lambda old, numbers: _heads(old, numbers["heads"]),
    "Rearranged": lambda old, numbers: Rearranged(old or nn.Identity(), numbers["index"], numbers["axis"]),
}


def save_shrunk(
    model: nn.Module,
    file: str | os.PathLike[str],
    name: str | None = None,
    options: Mapping[str, Any] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Write a network, shrunk or not: safetensors with a JSON header, replacing an old file only when all is on disk.

    Args:
        model: the network.
        file: where to.
        name: the network of :mod:`dessilbi.models` that it was made from, with the `options` it was made with; then
            `load_shrunk(file)` needs nothing else. For any other network `load_shrunk` is given its constructor.
        facts: plain data to keep with it, such as an input shape.
    """
    if name is not None:
        from dessilbi.models import names

        if name not in names():
            raise ValueError(
                f"name={name!r} is not one of the networks of dessilbi.models ({', '.join(names())}): leave it out, "
                "and give load_shrunk the factory"
            )
    arrays, kinds = {}, {}
    for key, t in _tensors(model).items():
        t = t.detach().cpu().contiguous()
        kinds[key] = str(t.dtype).removeprefix("torch.")
        arrays[key] = t.view(_AS_INTEGERS[t.dtype]).numpy() if t.dtype in _AS_INTEGERS else t.numpy()
    header = {
        "network": name,
        "options": dict(options or {}),
        "facts": dict(facts or {}),
        "modules": structure(model),
        "dtypes": kinds,
    }
    files.save_arrays(file, _KIND, _VERSION, arrays, header)


def load_shrunk(file: str | os.PathLike[str], factory: Callable[[], nn.Module] | None = None) -> nn.Module:
    """Read a network written by `save_shrunk`.

    Args:
        file: the file.
        factory: makes the dense network that it was shrunk from; not needed where the file names one of
            :mod:`dessilbi.models`. Nothing that the file says is imported or run.
    """
    arrays, header = files.load_arrays(file, _KIND, _VERSION)
    where = os.fspath(file)
    try:
        modules, kinds, name, options = (header[key] for key in ("modules", "dtypes", "network", "options"))
        tensors = {key: _tensor(a, kinds[key]) for key, a in arrays.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where}: damaged network file ({error})") from None
    model = _dense(where, name, options, factory)
    try:
        restore(model, modules, tensors)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{where}: does not fit the network that its constructor makes: {error}") from None
    return model


def structure(model: nn.Module) -> dict[str, Any]:
    """What makes a network of other sizes than its constructor's, as plain data: types and sizes of its modules."""
    return {path: {"type": type(m).__name__, "numbers": _numbers(m)} for path, m in model.named_modules()}


def restore(model: nn.Module, modules: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Give a network, in place, the sizes of a `structure` and its parameters and persistent buffers."""
    for path in modules:
        _match(model, path, modules)
    _fill(model, tensors)


def facts_of(file: str | os.PathLike[str]) -> dict[str, Any]:
    """The plain data that a file keeps with its network, and `network` and `options`, what it was made from."""
    _, header = files.load_arrays(file, _KIND, _VERSION)
    return {**header.get("facts", {}), "network": header.get("network"), "options": header.get("options", {})}


def _dense(where: str, name: Any, options: Any, factory: Callable[[], nn.Module] | None) -> nn.Module:
    if factory is not None:
        model = factory()
        if not isinstance(model, nn.Module):
            raise TypeError(f"factory must make a torch.nn.Module, it made a {type(model).__name__}")
        return model
    if name is None:
        raise ValueError(f"{where}: does not name a network of dessilbi.models: give load_shrunk(file, factory=...)")
    from dessilbi.models import create, names

    if name not in names():
        raise ValueError(f"{where}: names the network {name!r}, which dessilbi.models does not have")
    return create(name, **options)


def _numbers(module: nn.Module) -> dict[str, Any]:
    """The sizes that a module keeps: whole numbers, and tuples of them."""
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in vars(module).items()
        if not key.startswith("_")
        and (type(value) is int or (isinstance(value, tuple) and all(type(v) is int for v in value)))
    }


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers, shared ones once."""
    persistent = model.state_dict().keys()
    buffers = {name: b for name, b in model.named_buffers() if name in persistent}
    return {**dict(model.named_parameters()), **buffers}


def _tensor(array: np.ndarray, kind: str) -> Tensor:
    dtype = getattr(torch, kind)
    t = torch.from_numpy(np.array(array))
    return t.view(dtype) if dtype in _AS_INTEGERS else t.to(dtype)


def _match(model: nn.Module, path: str, modules: Mapping[str, Any]) -> None:
    """Give the module at a path the type and the numbers of the file."""
    kind, numbers = modules[path]["type"], modules[path]["numbers"]
    try:
        module = model.get_submodule(path)
    except AttributeError:
        module = None
    if module is None or (type(module).__name__ != kind and path):
        if kind not in _MADE:
            found = "nothing" if module is None else f"a {type(module).__name__}"
            raise ValueError(f"{path} is a {kind} in the file, and {found} in the network")
        made = _MADE[kind](module, numbers)
        for name, _ in list(made.named_children()):
            if f"{path}.{name}" not in modules:
                delattr(made, name)
        model.set_submodule(path, made)
        return
    if type(module).__name__ != kind:
        raise ValueError(f"the file is of a {kind}, the constructor makes a {type(module).__name__}")
    own = _numbers(module)
    if own.keys() != numbers.keys():
        differ = sorted(own.keys() ^ numbers.keys())[0]
        raise ValueError(f"{path or kind}: {differ} is known to the {'file' if differ in numbers else 'network'} only")
    for key, value in numbers.items():
        if own[key] != value:
            setattr(module, key, tuple(value) if isinstance(value, list) else value)


def _fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put the file's tensors in the place of the network's."""
    made: dict[int, Tensor] = {}
    used = set()
    persistent = model.state_dict().keys()
    for path, module in model.named_modules():
        for kind in (module._parameters, module._buffers):
            for key, old in kind.items():
                name = f"{path}.{key}" if path else key
                if old is None or name not in persistent:
                    continue
                if id(old) in made:
                    kind[key] = made[id(old)]  # type: ignore[assignment]
                    used.add(name)  # a state_dict has it twice
                    continue
                if name not in tensors:
                    raise ValueError(f"the file has no tensor {name}")
                new = tensors[name]
                if new.ndim != old.ndim:
                    raise ValueError(
                        f"{name} has shape {tuple(new.shape)} in the file, {tuple(old.shape)} in the network"
                    )
                new = nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new
                made[id(old)] = made[id(new)] = kind[key] = new  # type: ignore[assignment]
                used.add(name)
    if tensors.keys() - used:
        raise ValueError(f"the network has no tensor {sorted(tensors.keys() - used)[0]}")
