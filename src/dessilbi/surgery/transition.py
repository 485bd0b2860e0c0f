"""Layers that are left out of a plain chain, and what joins the ends."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from dessilbi.surgery.graph import Graph, Inputs, call_arguments
from dessilbi.surgery.nodes import inside, name_of, owner, shape_of

_POOLS = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


class Transition(nn.Module):
    """Takes a dropped layer's place where the sizes differ: pools as the layer strode, and pads channels with zeros.

    Args:
        new_channels: how many channels of zeros follow those of the input; negative, how many of its last ones go.
        stride: of the layer, an axis each; empty after a linear layer.
        crop: how many pixels the layer lost at the start and the end of every axis, the last axis first, as in
            :func:`torch.nn.functional.pad`.
    """

    def __init__(self, new_channels: int, stride: Sequence[int] = (), crop: Sequence[int] = ()) -> None:
        super().__init__()
        self.new_channels = new_channels
        self.stride = tuple(stride)
        self.crop = tuple(crop)

    def forward(self, x: Tensor) -> Tensor:
        if any(s > 1 for s in self.stride):
            x = _POOLS[len(self.stride)](x, self.stride, self.stride, ceil_mode=True)
        return F.pad(x, (*(-c for c in self.crop), 0, self.new_channels))

    def extra_repr(self) -> str:
        return f"new_channels={self.new_channels}, stride={self.stride}, crop={self.crop}"


def leave_out(model: nn.Module, graph: Graph, names: Iterable[str], example_inputs: Inputs) -> list[str]:
    """Replace these layers, named by their weights, in place where all of the network's data pass through them.

    A layer beside which data pass, on a shortcut, is left alone: with nothing selected its branch is zero. So is one
    that the network's code does not run without. Returns the modules that were replaced, normalisations included.
    """
    done: list[str] = []
    for name in names:
        path = name.rpartition(".")[0]
        readers = [n for n in graph.nodes if any(graph.names.get(x) == name for x in graph.inputs(n))]
        if len(readers) != 1 or not _on_every_way(graph, readers[0]):
            continue
        node = readers[0]
        layer = model.get_submodule(path)
        if not isinstance(layer, (nn.Linear, nn.modules.conv._ConvNd)) or owner(node)[0] != path:
            continue  # a weight that is used outside of a layer of its own
        if any(n in graph.outputs for n in _followers(graph, node)):
            warnings.warn(f"layer {path!r} makes the output: it stays, although nothing of it is selected",
                          UserWarning, stacklevel=4)  # fmt: skip
            continue
        stand_ins = {path: _between(graph, node, layer)}
        following = [n for n in graph.nodes if node in graph.inputs(n)]
        if len(following) == 1 and name_of(following[0]).endswith("_norm"):
            norm = owner(following[0])[0]
            if norm and [n for n in graph.nodes if inside(owner(n)[0], norm)] == following:
                stand_ins[norm] = nn.Identity()
        if _runs_with(model, stand_ins, example_inputs):
            done += stand_ins
        else:
            warnings.warn(f"the network's code needs layer {path!r}: it stays, although nothing of it is selected",
                          UserWarning, stacklevel=4)  # fmt: skip
    return done


@torch.no_grad()
def _runs_with(model: nn.Module, stand_ins: Mapping[str, nn.Module], example_inputs: Inputs) -> bool:
    """Put these in their places, if the network runs with them there."""
    before = {path: model.get_submodule(path) for path in stand_ins}
    args, kwargs = call_arguments(example_inputs)
    for path, module in stand_ins.items():
        model.set_submodule(path, module)
    try:
        model(*args, **kwargs)
    except Exception:  # an attribute of the layer that there is no more, say
        for path, module in before.items():
            model.set_submodule(path, module)
        return False
    return True


def _between(graph: Graph, node: fx.Node, layer: nn.Module) -> nn.Module:
    before, after = shape_of(next(x for x in graph.inputs(node) if x not in graph.names)), shape_of(node)
    if isinstance(layer, nn.Linear):
        new = after[-1] - before[-1]
        return Transition(new) if new else nn.Identity()
    axes = len(after) - 2
    stride = tuple(int(s) for s in layer.stride)  # type: ignore[union-attr, arg-type]
    crop: list[int] = []
    for axis in reversed(range(axes)):
        lost = -(-before[2 + axis] // stride[axis]) - after[2 + axis]
        crop += [lost // 2, lost - lost // 2]
    new = after[1] - before[1]
    if not new and not any(crop) and all(s == 1 for s in stride):
        return nn.Identity()
    return Transition(new, stride, crop)


def _on_every_way(graph: Graph, node: fx.Node) -> bool:
    """Whether nothing reaches the output from the input without passing this operator."""
    reached: set[fx.Node] = set()
    for n in graph.nodes:
        inputs = [x for x in graph.inputs(n) if x not in graph.names]
        if n is not node and any(x in reached or x.op == "placeholder" for x in inputs):
            reached.add(n)
    return not any(n in reached for n in graph.outputs)


def _followers(graph: Graph, node: fx.Node) -> list[fx.Node]:
    """The operator and the elementwise ones after it."""
    found = [node]
    for n in graph.nodes:
        if any(x in found for x in graph.inputs(n)) and name_of(n) in ("relu", "softmax", "log_softmax", "sigmoid"):
            found.append(n)
    return found
