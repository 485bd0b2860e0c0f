"""What the new entries of a wider network hold, and how the old ones get into their places."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from dessilbi.coupling import Channels
from dessilbi.groups import Partition
from dessilbi.surgery.channels import joined
from dessilbi.surgery.graph import Graph
from dessilbi.surgery.nodes import along, name_of, varying
from dessilbi.surgery.plan import Cut
from dessilbi.surgery.rules import GroupNorm
from dessilbi.surgery.rules.elementwise import Prelu
from dessilbi.surgery.rules.norms import Norm
from dessilbi.surgery.widening_plan import Grown, Layer

_PRELU = 0.25
_FACTORS = ("mul", "multiply", "div", "true_divide", "divide")


class Insertion:
    """A tensor that goes with a parameter (momentum, V, a mask) with the new entries put in: the inverse of a
    :class:`Cut`. New entries of numbers are zero, those of masks true.

    Args:
        cut: what of the wider parameter are the old entries.
        like: the wider parameter, for its shape and layout in memory.
        fill: what the new entries of the parameter itself start from, where that is a constant.
    """

    def __init__(self, cut: Cut, like: Tensor, fill: float = 0.0) -> None:
        self.cut, self.like, self.fill = cut, like, fill
        self.old = cut.size

    def __call__(self, t: Tensor) -> Tensor:
        cut, fill = self.cut, t.dtype == torch.bool
        if t.shape == self.old:
            whole = torch.full_like(self.like, fill, dtype=t.dtype, requires_grad=False)
            return self.into(whole, t)
        # What has one entry a filter, say: norms, shaped to be spread over the parameter.
        for axis, index in cut.index.items():
            if t.ndim > axis and t.shape[axis] == self.old[axis]:
                shape = [n if d != axis else cut.shape[axis] for d, n in enumerate(t.shape)]
                t = t.new_full(shape, fill).index_copy_(axis, index.to(t.device), t)
        return t

    def into(self, whole: Tensor, t: Tensor) -> Tensor:
        """Put the old entries into a tensor of the wider shape, in place."""
        part, scattered = whole, []
        for axis, index in self.cut.index.items():
            first = int(index[0])
            if int(index[-1]) - first == len(index) - 1:  # in one piece, as ever where what is new comes last
                part = part.narrow(axis, first, len(index))
            else:
                scattered.append((axis, index))
        if not scattered and self.cut.columns is None:
            part.copy_(t)
            return whole
        where = [torch.arange(n, device=whole.device) for n in part.shape[: max(2, 1 + max(self.cut.index, default=0))]]
        for axis, index in scattered:
            where[axis] = index.to(whole.device)
        places = [w.view([-1 if d == e else 1 for e in range(len(where))]) for d, w in enumerate(where)]
        if self.cut.columns is not None:
            places[1] = self.cut.columns.to(whole.device)
        part[tuple(places)] = t.to(whole.dtype)
        return whole


def constants(graph: Graph) -> dict[str, float]:
    """What new entries of parameters and buffers are that are no layers' weights, where that is not zero: those of a
    normalisation or a factor change nothing."""
    found: dict[str, float] = {}
    for node in graph.nodes:
        rule, call = graph.rules[node], graph.calls[node]
        if isinstance(rule, (Norm, GroupNorm)):
            ones: list[Any] = [call.get("weight"), call.get("running_var")]
        elif name_of(node) in _FACTORS:
            ones = graph.inputs(node)
        elif isinstance(rule, Prelu):
            found[graph.names.get(call["weight"], "")] = _PRELU
            continue
        else:
            continue
        found.update((graph.names[x], 1.0) for x in ones if x in graph.names)
    return found


def he(plan: Grown, layer: Layer, t: Tensor, generator: torch.Generator, small: float = 0.0) -> None:
    """Draw a layer's new filters, in place, from He's normal distribution for what a ReLU feeds: the norm of every
    filter is about √2. What reads new channels gets the part `small` of that."""
    fan_in = math.prod(n for d, n in enumerate(t.shape) if d != layer.rows)
    if layer.rows == 1 and layer.weight in plan.graph.grouped:
        fan_in //= plan.graph.grouped[layer.weight].groups
    std = math.sqrt(2 / fan_in)
    mask = new_filters(plan, layer)
    if small or mask.numel() > t.shape[layer.rows]:
        values = torch.randn(t.shape, generator=generator) * torch.where(mask, std, small * std)
        t.copy_(values)
    elif mask.any():
        rows = mask.flatten().nonzero().flatten()
        values = torch.randn([len(rows) if d == layer.rows else n for d, n in enumerate(t.shape)], generator=generator)
        t.index_copy_(layer.rows, rows.to(t.device), values.mul_(std).to(t.device, t.dtype))


def new_filters(plan: Grown, layer: Layer) -> Tensor:
    """Where a weight belongs to a new filter, as a mask that spreads over it."""
    shape = plan.graph.shapes[layer.weight]
    rest = [1] * (len(shape) - 2)
    g = plan.graph.grouped.get(layer.weight)
    lost = plan.lost(layer.atoms)
    if g is not None and g.transposed:  # a row is an input, its columns the outputs of its group
        return lost.view(g.groups, 1, -1).expand(-1, len(g.inner) // g.groups, -1).reshape(*shape[:2], *rest)
    return lost.view(1, -1, *rest) if layer.rows == 1 else lost.view(-1, 1, *rest)


def untouched(layer_mask: Tensor, insertion: Insertion) -> Tensor:
    """Where a wider weight is neither an old entry nor a new filter's: what its layer's old filters read of new
    channels."""
    new = layer_mask.to(insertion.like.device).expand(insertion.like.shape).clone()
    return ~insertion.into(new, torch.ones(insertion.old, dtype=torch.bool, device=new.device))


# -- filters that are split --------------------------------------------------------------------------------------


def split(plan: Grown, name: str, layer: Layer | None, t: Tensor, generator: torch.Generator, small: float) -> None:
    """Make the new channels of a parameter or buffer copies of their templates, in place. What reads a channel of which
    there are k now takes a k-th of each, and more of one by a random amount than of the other."""
    g = plan.graph.grouped.get(name)
    axes = [axis for axis in range(t.ndim) if (name, axis) in plan.graph.axes]
    parts = [(t, axis, plan.graph.axes[name, axis]) for axis in axes]
    if name in plan.graph.scattered:
        atoms = plan.graph.scattered[name]
        parts = [(t, axis, along(atoms, axis, t.shape[axis])) for axis in varying(atoms)]
    if g is not None:  # in every group the columns are other channels
        other = (g.outer if g.transposed else g.inner).view(g.groups, -1)
        parts += [(rows, 1, classes) for rows, classes in zip(t.chunk(g.groups), other, strict=True)]
    for part, axis, atoms in parts:
        reads = layer is not None and axis == layer.columns
        _split_along(plan, part, axis, plan.graph.classes[atoms], small if reads else None, generator)


def _split_along(
    plan: Grown, t: Tensor, axis: int, classes: Tensor, small: float | None, generator: torch.Generator
) -> None:
    new = plan.gone[classes]
    source = torch.arange(len(classes))
    for c in classes[new].unique():
        templates = (classes == plan.origin[c]).nonzero().flatten()
        if len(templates):  # a depthwise filter reads its own channel alone
            source[classes == c] = templates
    if torch.equal(source, torch.arange(len(classes))):
        return
    if small is not None:
        shares = torch.bincount(source, minlength=len(source)).clamp_min(1).to(t)
        t.div_(shares.view([-1 if d == axis else 1 for d in range(t.ndim)]))
    t.copy_(t.index_select(axis, source.to(t.device)))
    if small is not None:
        where = (source != torch.arange(len(source))).nonzero().flatten()
        std = small * math.sqrt(2 * t.shape[0] / t.numel())
        shape = [len(where) if d == axis else n for d, n in enumerate(t.shape)]
        more = (torch.randn(shape, generator=generator) * std).to(t.device, t.dtype)
        t.index_add_(axis, where.to(t.device), more)
        t.index_add_(axis, source[where].to(t.device), more, alpha=-1)


# -- tensors and groups of another size ----------------------------------------------------------------------------


class Sized:
    """Makes a tensor of another size, all zeros, from one."""

    def __init__(self, size: torch.Size, channels_last: bool) -> None:
        self.size, self.channels_last = size, channels_last

    def __call__(self, t: Tensor) -> Tensor:
        form = torch.channels_last if self.channels_last and len(self.size) == 4 else torch.contiguous_format
        return torch.empty(self.size, dtype=t.dtype, device=t.device, memory_format=form).zero_()


def is_channels_last(model: nn.Module) -> bool:
    return any(
        p.ndim == 4 and p.is_contiguous(memory_format=torch.channels_last) and not p.is_contiguous()
        for p in model.parameters()
    )


def regroup(group: Any, names: list[str], graph: Graph) -> Any:
    """The groups of the new parameters: as before, joined anew where they span tensors."""
    if not isinstance(group, (list, tuple)):
        return group
    filters: dict[str, Partition] = {
        name: part.filters for name, part in zip(names, group, strict=True) if isinstance(part, Channels)
    }
    together = joined(graph, filters) if filters else {}
    return tuple(together.get(name, part) for name, part in zip(names, group, strict=True))
