"""What is asked of the nodes of an exported graph, and of tensors in compact form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx


@dataclass
class Grouped:
    """A convolution in groups: the atoms of all its input and output channels, and which of them `axis` 0 holds."""

    groups: int
    inner: Tensor
    outer: Tensor
    transposed: bool


@dataclass
class Pad:
    """Channels added to a tensor: for each of the output's the input's it comes from (-1: new), and the atoms."""

    source: Tensor
    inner: Tensor
    outer: Tensor


@dataclass
class Blocked:
    """An operator that is not known here, and the atoms that flow into it."""

    node: fx.Node
    atoms: Tensor


def shape_of(node: fx.Node) -> torch.Size:
    """The shape of a node's tensor; empty for anything else."""
    value = node.meta.get("val")
    return value.shape if isinstance(value, Tensor) else torch.Size()


def owner(node: fx.Node) -> tuple[str, str]:
    """The path and the type of the innermost module that an operator belongs to."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return "", ""
    path, kind = stack[-1][0], stack[-1][1]
    return path.split("@")[0], (kind if isinstance(kind, str) else kind.__name__).rpartition(".")[2]


def inside(path: str, parent: str) -> bool:
    """Whether a module is `parent` or below it."""
    return not parent or path == parent or path.startswith(parent + ".")


def name_of(node: fx.Node) -> str:
    """The operator without namespace, overload and the mark of an in-place variant: ``add_.Tensor`` is add."""
    return full_name(node).removesuffix("_")


def full_name(node: fx.Node) -> str:
    target = node.target
    packet = getattr(target, "_overloadpacket", None)
    return str(getattr(packet or target, "__name__", target))


def in_place(node: fx.Node) -> bool:
    """Whether the operator writes into its first argument."""
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable and full_name(node).endswith("_"))


def returns_nothing(node: fx.Node) -> bool:
    """Whether the operator has no output and changes nothing."""
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and not schema.returns and not schema.is_mutable)


def call_of(node: fx.Node, resolve: Callable[[fx.Node], fx.Node]) -> dict[str, Any]:
    """The arguments by their names, defaults filled in."""
    schema = getattr(node.target, "_schema", None)
    given = fx.node.map_arg((tuple(node.args), dict(node.kwargs)), resolve)
    args, kwargs = given
    if schema is None:
        return {**{str(i): a for i, a in enumerate(args)}, **kwargs}
    found: dict[str, Any] = {}
    for i, argument in enumerate(schema.arguments):
        if i < len(args):
            found[argument.name] = args[i]
        elif argument.name in kwargs:
            found[argument.name] = kwargs[argument.name]
        else:
            found[argument.name] = argument.default_value if argument.has_default_value() else None
    return found


def nodes_in(value: Any) -> list[fx.Node]:
    """The nodes among arguments, nested ones too."""
    found: list[fx.Node] = []
    fx.node.map_arg(value, found.append)
    return found


# -- compact form: axes along which nothing changes have size one ------------------------------------------------


def varying(x: Tensor) -> list[int]:
    """The axes along which a compact tensor changes."""
    return [d for d, n in enumerate(x.shape) if n > 1]


def compact(x: Tensor) -> Tensor:
    """Axes along which nothing changes, cut to size one."""
    for d, n in enumerate(x.shape):
        if n > 1:
            first = x.narrow(d, 0, 1)
            if x.stride(d) == 0 or bool((x == first).all()):
                x = first
    return x


def reduced(x: Tensor, shape: Sequence[int], how: str) -> Tensor:
    """A boolean tensor brought to a compact shape by `any` or `all`; leading axes that are too many go too."""
    while x.ndim > len(shape):
        x = x.any(0) if how == "any" else x.all(0)
    for d, n in enumerate(shape):
        if n == 1 and x.shape[d] > 1:
            x = x.any(d, keepdim=True) if how == "any" else x.all(d, keepdim=True)
    return x.expand(tuple(shape))


def along(x: Tensor, axis: int, size: int) -> Tensor:
    """The values of a compact tensor along one axis, which is the only one it may change along."""
    return x.movedim(axis, 0).reshape(x.shape[axis], -1)[:, 0].expand(size)


def onto(vector: Tensor, axis: int, ndim: int) -> Tensor:
    """A vector as a compact tensor that changes along one axis."""
    return vector.view([-1 if d == axis else 1 for d in range(ndim)])


def aligned(x: Tensor, ndim: int) -> Tensor:
    """With leading axes of size one, as broadcasting adds them."""
    return x.view([1] * (ndim - x.ndim) + list(x.shape))
