"""The networks of the paper, by name, beside any network of the user's own.

    from dessilbi.models import create, input_shape, names

    names()                                      # ['alexnet', 'lenet5', 'resnet110', ...]
    create("vgg16", num_classes=100)             # a network of this folder
    create("mypackage.nets:build")               # anything that makes a torch.nn.Module
    input_shape("lenet5")                        # (1, 28, 28)

A network is imported when it is created: listing the names does not import torch. To add one, write its file
and give it a line in the table below. It takes `num_classes`, `in_channels` and `widths`, and torch.fx can
trace it.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import nn

__all__ = ["create", "input_shape", "names"]


class _Network(NamedTuple):
    factory: str
    input_shape: tuple[int, int, int]


_CIFAR = (3, 32, 32)
_IMAGENET = (3, 224, 224)
_NETWORKS = {
    "lenet5": _Network("dessilbi.models.lenet:LeNet5", (1, 28, 28)),
    "resnet20": _Network("dessilbi.models.resnet_cifar:resnet20", _CIFAR),
    "resnet32": _Network("dessilbi.models.resnet_cifar:resnet32", _CIFAR),
    "resnet44": _Network("dessilbi.models.resnet_cifar:resnet44", _CIFAR),
    "resnet50": _Network("dessilbi.models.resnet_cifar:resnet50", _CIFAR),
    "resnet56": _Network("dessilbi.models.resnet_cifar:resnet56", _CIFAR),
    "resnet110": _Network("dessilbi.models.resnet_cifar:resnet110", _CIFAR),
    "vgg16": _Network("dessilbi.models.vgg:vgg16", _CIFAR),
    "vgg19": _Network("dessilbi.models.vgg:vgg19", _CIFAR),
    "alexnet": _Network("dessilbi.models.alexnet:AlexNet", _IMAGENET),
    "resnet18": _Network("dessilbi.models.resnet:resnet18", _IMAGENET),
    "resnet50_imagenet": _Network("dessilbi.models.resnet:resnet50_imagenet", _IMAGENET),
}


def names() -> list[str]:
    """The names that `create` knows, sorted."""
    return sorted(_NETWORKS)


def input_shape(name: str) -> tuple[int, int, int]:
    """Channels, height and width of the images that the network `name` was defined for."""
    if ":" in name:
        raise ValueError(f"the input shape of {name!r} is not known here: take it from the data, or state it")
    return _entry(name).input_shape


def create(name: str, num_classes: int | None = None, in_channels: int | None = None, **kwargs: Any) -> nn.Module:
    """A new network.

    `name` is one of `names()`, or `package.module:factory`, where the factory is a function or class whose
    result is a `torch.nn.Module`. `num_classes` and `in_channels` usually come from the data: None leaves the
    network's own default, and a factory that does not take them is called without. What is in `kwargs` (such
    as `widths`) was asked for, so it is passed on as it is, and a factory that does not take it raises
    TypeError.
    """
    factory = _load(name if ":" in name else _entry(name).factory)
    offered = {"num_classes": num_classes, "in_channels": in_channels}
    network = _call(factory, kwargs, {key: value for key, value in offered.items() if value is not None})

    from torch import nn

    if not isinstance(network, nn.Module):
        raise TypeError(f"{name!r} made a {type(network).__name__}; a network is a torch.nn.Module")
    return network


def _entry(name: str) -> _Network:
    if name in _NETWORKS:
        return _NETWORKS[name]
    raise ValueError(
        f"unknown network {name!r}{_nearest(name.lower(), names())}; known are {', '.join(names())},"
        " and your own is given as 'package.module:factory'"
    )


def _nearest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def _load(target: str) -> Callable[..., Any]:
    """The object that `package.module:factory` names."""
    module_name, _, attribute = target.partition(":")
    if not all(part.isidentifier() for part in f"{module_name}.{attribute}".split(".")):
        raise ValueError(f"network {target!r}: write 'package.module:factory', such as 'mypackage.nets:build'")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if f"{module_name}.".startswith(f"{error.name}."):
            remedy = "install it, or add the folder it is in to PYTHONPATH"
        else:
            remedy = f"{module_name!r} imports it, so install it"
        raise ValueError(f"network {target!r}: there is no module {error.name!r}; {remedy}") from error
    try:
        factory = operator.attrgetter(attribute)(module)
    except AttributeError:
        hint = _nearest(attribute, dir(module))
        raise ValueError(f"network {target!r}: module {module_name!r} has no {attribute!r}{hint}") from None
    # A network is callable too, but calling it would run it.
    if not callable(factory) or (hasattr(factory, "forward") and not inspect.isclass(factory)):
        raise TypeError(
            f"network {target!r} is an object of type {type(factory).__name__}; name the function or class"
            " that makes the network"
        )
    return factory  # type: ignore[no-any-return]


def _call(factory: Callable[..., Any], kwargs: dict[str, Any], offered: dict[str, int]) -> Any:
    """`factory(**kwargs)`, with those of the arguments `offered` that it takes."""
    parameters = inspect.signature(factory).parameters.values()
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    taken = {key: value for key, value in offered.items() if key in named}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    # **kwargs does not tell what is taken in the end: torchvision's resnet18 hands it on to a class that
    # knows num_classes and refuses in_channels. Only trying tells.
    tried = {key: value for key, value in offered.items() if open_ended and key not in named}
    while True:
        try:
            return factory(**kwargs, **taken, **tried)
        except TypeError as error:
            refused = [key for key in tried if f"unexpected keyword argument '{key}'" in str(error)]
            if not refused:
                raise
            del tried[refused[0]]
