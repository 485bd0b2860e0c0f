"""What operators do to channels: one small rule a family of operators.

A rule answers three questions about a node:

    link   how do the atoms of its inputs and parameters become those of its output, and what is tied together?
    zero   where is the output zero, given where the inputs are, whatever else they hold?
    live   which input positions matter, given the output positions that matter (and are not zero anyway)?

`zero` goes forward through the network and `live` backward; a position that is zero or does not matter can go. All
tensors of positions are compact: axes along which nothing changes have size one.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from dessilbi.surgery.nodes import (
    Grouped,
    Pad,
    aligned,
    along,
    compact,
    full_name,
    in_place,
    name_of,
    onto,
    reduced,
    shape_of,
    varying,
)

if TYPE_CHECKING:
    from dessilbi.surgery.flow import Flow
    from dessilbi.surgery.graph import Graph


class Rule:
    """An operator about which nothing is known: what flows into it cannot be removed, and its output is fixed."""

    def link(self, g: Graph, n: fx.Node) -> None:
        for x in g.inputs(n):
            for atoms in _list(g.present(x)):
                if x in g.names:
                    g.pin(atoms)
                elif atoms.any():
                    g.block(n, atoms)
        g.atoms[n] = fixed(n)

    def zero(self, f: Flow, n: fx.Node) -> Any:
        atoms = f.graph.atoms[n]
        return [torch.zeros_like(a, dtype=torch.bool) for a in atoms] if isinstance(atoms, list) else no(atoms)

    def live(self, f: Flow, n: fx.Node, out: Any) -> None:
        for x in f.graph.inputs(n):
            f.need_all(x)

    def touched(self, g: Graph, n: fx.Node) -> list[int] | None:
        """The output axes whose size may be written into the network's code; None: none is."""
        return None


def _list(x: Any) -> list[Any]:
    return x if isinstance(x, list) else [x]


def no(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.bool)


def fixed(n: fx.Node) -> Any:
    """The atoms of an output that stays as it is."""
    value = n.meta.get("val")
    if isinstance(value, (list, tuple)):
        return [torch.zeros([1] * (v.ndim if isinstance(v, Tensor) else 0), dtype=torch.long) for v in value]
    return torch.zeros([1] * len(shape_of(n)), dtype=torch.long)


class Constant(Rule):
    """Makes or reads nothing but what is fixed: index computations, masks, new tensors."""

    def link(self, g: Graph, n: fx.Node) -> None:
        g.atoms[n] = fixed(n)


class Pinned(Rule):
    """Known to need all of its inputs as they are: argmax, cumulative sums, weights that are computed."""

    def link(self, g: Graph, n: fx.Node) -> None:
        for x in g.inputs(n):
            g.pin(g.look(x))
        g.atoms[n] = fixed(n)
        g.pinned.add(n)


class Unary(Rule):
    """Works on every element alone; `zero_stays` if f(0) = 0."""

    def __init__(self, zero_stays: bool) -> None:
        self.zero_stays = zero_stays

    def keeps_zero(self, call: dict[str, Any]) -> bool:
        return self.zero_stays

    def link(self, g: Graph, n: fx.Node) -> None:
        g.atoms[n] = g.look(g.inputs(n)[0])

    def zero(self, f: Flow, n: fx.Node) -> Tensor:
        zero = f.zero_of(f.graph.inputs(n)[0])
        return zero if self.keeps_zero(f.graph.calls[n]) else no(zero)

    def live(self, f: Flow, n: fx.Node, out: Tensor) -> None:
        f.need(f.graph.inputs(n)[0], out)


class Clamp(Unary):
    def __init__(self) -> None:
        super().__init__(True)

    def keeps_zero(self, call: dict[str, Any]) -> bool:
        low, high = call.get("min", call.get("min_val")), call.get("max", call.get("max_val"))
        return (low is None or low <= 0) and (high is None or high >= 0)


class Power(Unary):
    def __init__(self) -> None:
        super().__init__(True)

    def keeps_zero(self, call: dict[str, Any]) -> bool:
        exponent = call.get("exponent")
        return isinstance(exponent, (int, float)) and exponent > 0


class Softmax(Unary):
    """Mixes one axis: what changes along it stays."""

    def __init__(self) -> None:
        super().__init__(False)

    def link(self, g: Graph, n: fx.Node) -> None:
        super().link(g, n)
        call = g.calls[n]
        axis = call["dim"] % max(1, len(shape_of(n)))
        if axis in varying(g.atoms[n]):
            g.pin(g.atoms[n])

    def live(self, f: Flow, n: fx.Node, out: Tensor) -> None:
        super().live(f, n, out.any(f.graph.calls[n]["dim"], keepdim=True))


class Prelu(Unary):
    def __init__(self) -> None:
        super().__init__(True)

    def link(self, g: Graph, n: fx.Node) -> None:
        call = g.calls[n]
        x, name = call["self"], g.names.get(call["weight"])
        atoms = g.atoms[n] = g.look(x)
        if name is None or (g.shapes[name].numel() > 1 and not only_along(atoms, 1)):
            g.pin(atoms)
        elif g.shapes[name].numel() > 1:
            g.tie(channels(atoms, x, 1), g.axis(name, 0))


class Spatial(Unary):
    """Pooling and resampling: the last axes, which no channel may lie along."""

    def __init__(self) -> None:
        super().__init__(True)

    def link(self, g: Graph, n: fx.Node) -> None:
        x = g.inputs(n)[0]
        atoms, axes = g.look(x), int("".join(c for c in full_name(n) if c.isdigit())[:1] or 2)
        if any(d >= atoms.ndim - axes for d in varying(atoms)) or isinstance(n.meta.get("val"), (list, tuple)):
            g.pin(atoms)
            g.atoms[n] = fixed(n)
            return
        g.atoms[n] = atoms

    def zero(self, f: Flow, n: fx.Node) -> Any:
        if isinstance(f.graph.atoms[n], list):
            return Rule.zero(self, f, n)
        return super().zero(f, n)

    def live(self, f: Flow, n: fx.Node, out: Any) -> None:
        f.need_all(f.graph.inputs(n)[0]) if isinstance(out, list) else super().live(f, n, out)


class Reduction(Rule):
    """Mean, sum, maximum over axes. Over channels a sum can do without zeros, anything else needs all of them."""

    def link(self, g: Graph, n: fx.Node) -> None:
        x = g.inputs(n)[0]
        atoms, axes = g.look(x), self.axes(g, n)
        if isinstance(n.meta.get("val"), (list, tuple)):
            g.pin(atoms)
            g.atoms[n] = fixed(n)
            return
        lost = [d for d in varying(atoms) if d in axes]
        if lost and len(lost) == len(varying(atoms)):
            if name_of(n) != "sum":
                g.pin(atoms)
            atoms = torch.zeros([1] * atoms.ndim, dtype=torch.long)
        for d in lost:  # summed over something that is not the channels, which then lose the same everywhere
            g.tie(atoms, atoms.narrow(d, 0, 1))
            atoms = atoms.narrow(d, 0, 1)
        g.atoms[n] = atoms.reshape([s for d, s in enumerate(atoms.shape) if self.keeps(g, n) or d not in axes])

    def axes(self, g: Graph, n: fx.Node) -> list[int]:
        ndim, dim = len(shape_of(g.inputs(n)[0])), g.calls[n].get("dim")
        axes = list(range(ndim)) if dim is None or dim == [] else dim if isinstance(dim, (list, tuple)) else [dim]
        return [d % ndim for d in axes]

    def keeps(self, g: Graph, n: fx.Node) -> bool:
        return bool(g.calls[n].get("keepdim"))

    def zero(self, f: Flow, n: fx.Node) -> Any:
        if isinstance(f.graph.atoms[n], list):
            return super().zero(f, n)
        zero = f.zero_of(f.graph.inputs(n)[0])
        for d in self.axes(f.graph, n):
            zero = zero.all(d, keepdim=True)
        return zero.reshape(f.graph.atoms[n].shape)

    def live(self, f: Flow, n: fx.Node, out: Any) -> None:
        x = f.graph.inputs(n)[0]
        if isinstance(out, list):
            f.need_all(x)
            return
        axes = self.axes(f.graph, n)
        shape = [1 if d in axes else s for d, s in enumerate(f.graph.look(x).shape)]
        f.need(x, out.reshape(shape))


class Binary(Rule):
    """Elementwise on two operands, broadcast against each other; or on one and a number.

    `absorbs`: one zero makes the product zero. `first`: a zero first operand does (division).
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def operands(self, g: Graph, n: fx.Node) -> tuple[Any, Any]:
        call = g.calls[n]
        names = [name for name in ("self", "other", "input", "tensor1") if name in call][:2]
        a, b = (call[name] for name in names)
        return a, b

    def link(self, g: Graph, n: fx.Node) -> None:
        a, b = self.operands(g, n)
        ndim = len(shape_of(n))
        if not (isinstance(a, fx.Node) and isinstance(b, fx.Node)):
            g.atoms[n] = aligned(g.look(a if isinstance(a, fx.Node) else b), ndim)
            return
        x, y = (aligned(self._met(g, v, other, ndim), ndim) for v, other in ((a, b), (b, a)))
        free_x, free_y = blank(a, ndim, varying(y)), blank(b, ndim, varying(x))
        if not (free_x and varying(y)) and not (free_y and varying(x)):
            g.tie(x, y)
        # The output goes by an operand that has all of its positions; where both do, by the simpler one.
        fit = [v for v, operand in ((x, a), (y, b)) if self._fits(operand, n, x, y)]
        if not fit:
            PINNED.link(g, n)
            return
        g.atoms[n] = min(fit, key=lambda v: (len(varying(v)), not v.any()))

    def _met(self, g: Graph, v: fx.Node, other: fx.Node, ndim: int) -> Tensor:
        """The atoms of an operand; a parameter that meets no channels gets none."""
        met = [0] if other in g.names else varying(aligned(g.look(other), ndim))
        if v in g.names and (not met or (other not in g.names and blank(v, ndim, met))):
            atoms: Tensor = g.present(v)
            return atoms.reshape([1] * len(shape_of(v))) if atoms.numel() == 1 else atoms
        atoms = g.look(v)
        return atoms

    def _fits(self, node: fx.Node, n: fx.Node, x: Tensor, y: Tensor) -> bool:
        """Whether an operand is broadcast along no axis that channels lie along."""
        shape, ndim = shape_of(node), len(shape_of(n))
        own = [1] * (ndim - len(shape)) + list(shape)
        return all(own[d] > 1 for d in {*varying(x), *varying(y)})

    def zero(self, f: Flow, n: fx.Node) -> Tensor:
        a, b = self.operands(f.graph, n)
        ndim = len(shape_of(n))
        if n in f.graph.pinned:
            return no(f.graph.atoms[n])
        za, zb = (aligned(f.zero_of(v), ndim) if isinstance(v, fx.Node) else torch.tensor(v == 0) for v in (a, b))
        shape = f.graph.atoms[n].shape
        if self.kind == "mul":
            zero = za | zb
        elif self.kind == "div":
            zero = za
        else:
            zero = za & zb
        return reduced(zero.expand(torch.broadcast_shapes(zero.shape, shape)), shape, "all")

    def live(self, f: Flow, n: fx.Node, out: Tensor) -> None:
        if n in f.graph.pinned:
            super().live(f, n, out)
            return
        a, b = self.operands(f.graph, n)
        for x, other in ((a, b), (b, a)):
            if not isinstance(x, fx.Node):
                continue
            matters = out
            if self.kind == "mul" and isinstance(other, fx.Node):
                matters = out & ~aligned(f.zero_of(other), out.ndim)
            f.need(x, matters)


def blank(v: fx.Node, ndim: int, axes: list[int]) -> bool:
    """Whether a tensor is broadcast along all of these axes, so that it does not care what happens along them."""
    shape = [1] * (ndim - len(shape_of(v))) + list(shape_of(v))
    return all(shape[d] == 1 for d in axes)


def only_along(atoms: Tensor, axis: int) -> bool:
    return set(varying(atoms)) <= {axis}


def channels(atoms: Tensor, x: fx.Node, axis: int) -> Tensor:
    return along(atoms, axis, shape_of(x)[axis])


class Affine(Rule):
    """Convolution and linear layers, transposed or not: the channels of the input meet an axis of the weight."""

    def link(self, g: Graph, n: fx.Node) -> None:
        x, name, bias = self.parts(g, n)
        axis = self.channel_axis(g, n)
        atoms = g.look(x)
        if name is None or (bias is not None and bias not in g.names) or len(g.shapes[name]) < 2:
            PINNED.link(g, n)
            return
        for d in varying(atoms):
            if d != axis:  # a channel goes at every place or at none
                g.tie(atoms, atoms.narrow(d, 0, 1))
                atoms = atoms.narrow(d, 0, 1)
        inner, groups = channels(atoms, x, axis), self.groups(g, n)
        ins, outs = (0, 1) if self.transposed(n) else (1, 0)
        if groups == 1:
            g.tie(inner, g.axis(name, ins))
            outer = g.axis(name, outs)
        else:
            held = g.axis(name, 0)
            if name not in g.grouped:
                other = g.new(shape_of(n)[axis] if ins == 0 else shape_of(x)[axis])
                inner_, outer_ = (held, other) if ins == 0 else (other, held)
                g.grouped[name] = Grouped(groups, inner_, outer_, transposed=ins == 0)
                if len(inner_) == len(outer_) == groups:
                    g.tie(inner_, outer_)  # depthwise: a group is one channel, in and out
            g.tie(inner, g.grouped[name].inner)
            outer = g.grouped[name].outer
        if bias is not None:
            g.tie(outer, g.axis(g.names[bias], 0))
        g.atoms[n] = onto(outer, axis, len(shape_of(n)))

    def parts(self, g: Graph, n: fx.Node) -> tuple[fx.Node, str | None, fx.Node | None]:
        call = g.calls[n]
        return call["input"], g.names.get(call["weight"]), call["bias"]

    def transposed(self, n: fx.Node) -> bool:
        return "transpose" in full_name(n)

    def groups(self, g: Graph, n: fx.Node) -> int:
        return int(g.calls[n].get("groups") or 1)

    def channel_axis(self, g: Graph, n: fx.Node) -> int:
        ndim = len(shape_of(n))
        if name_of(n) == "linear":
            return ndim - 1
        return ndim - len(shape_of(g.calls[n]["weight"])) + 1

    def _weight(self, f: Flow, n: fx.Node) -> tuple[Tensor, int]:
        """Where the weight is not zero, as (groups, outputs, inputs), and the axis of the channels."""
        _, name, _ = self.parts(f.graph, n)
        used, groups = f.used(str(name)), self.groups(f.graph, n)
        if self.transposed(n):
            return used.view(groups, -1, used.shape[1]).transpose(1, 2), self.channel_axis(f.graph, n)
        return used.view(groups, -1, used.shape[1]), self.channel_axis(f.graph, n)

    def zero(self, f: Flow, n: fx.Node) -> Tensor:
        atoms = f.graph.atoms[n]
        x, name, bias = self.parts(f.graph, n)
        axis = self.channel_axis(f.graph, n)
        if name is None or n in f.graph.pinned:
            return no(atoms)
        used, _ = self._weight(f, n)
        there = ~channels(reduced(f.zero_of(x), _only(f.zero_of(x), axis), "all"), x, axis).reshape(
            used.shape[0], 1, -1
        )
        outer = (used & there).any(2).flatten()
        if bias is not None:
            outer = outer | (f.value(f.graph.names[bias]) != 0)
        return reduced(onto(~outer, axis, atoms.ndim), atoms.shape, "all")

    def live(self, f: Flow, n: fx.Node, out: Tensor) -> None:
        if n in f.graph.pinned:
            super().live(f, n, out)
            return
        x, _, _ = self.parts(f.graph, n)
        used, axis = self._weight(f, n)
        matters = along(out, axis, shape_of(n)[axis]).reshape(used.shape[0], -1, 1)
        f.need(x, onto((used & matters).any(1).flatten(), axis, len(shape_of(x))))


def _only(x: Tensor, axis: int) -> list[int]:
    return [s if d == axis else 1 for d, s in enumerate(x.shape)]


class Addmm(Affine):
    """A linear layer whose weight is stored the other way round."""

    def parts(self, g: Graph, n: fx.Node) -> tuple[fx.Node, str | None, fx.Node | None]:
        call = g.calls[n]
        return call["mat1"], g.names.get(call["mat2"]), call["self"]

    def transposed(self, n: fx.Node) -> bool:
        return True

    def channel_axis(self, g: Graph, n: fx.Node) -> int:
        return 1


class Norm(Rule):
    """Batch and instance normalisation: every channel on its own."""

    def link(self, g: Graph, n: fx.Node) -> None:
        call = g.calls[n]
        x = call["input"]
        atoms = g.look(x)
        if not only_along(atoms, 1) or g.computed(call, "weight", "bias", "running_mean", "running_var"):
            PINNED.link(g, n)
            return
        g.atoms[n] = atoms
        inner = channels(atoms, x, 1)
        for part in ("weight", "bias", "running_mean", "running_var"):
            if call.get(part) is not None:
                g.tie(inner, g.axis(g.names[call[part]], 0))

    def _off(self, f: Flow, n: fx.Node) -> tuple[Tensor, Tensor]:
        """Where the scale is zero, and where a channel of zeros comes out as zero."""
        call, like = f.graph.calls[n], f.graph.atoms[n]
        size = shape_of(call["input"])[1]

        def zero(part: str, absent: bool) -> Tensor:
            if call.get(part) is None:
                return torch.full((size,), absent)
            return f.value(f.graph.names[call[part]]) == 0

        shift = zero("bias", True)
        flat, clean = zero("weight", False), shift & (zero("running_mean", True) | bool(call.get("use_input_stats")))
        shape = [s if d == 1 else 1 for d, s in enumerate(like.shape)]
        if like.shape[1] == 1:
            return flat.all().view(shape), clean.all().view(shape)
        return (flat & shift).view(shape), clean.view(shape)

    def zero(self, f: Flow, n: fx.Node) -> Tensor:
        if n in f.graph.pinned:
            return no(f.graph.atoms[n])
        flat, clean = self._off(f, n)
        call = f.graph.calls[n]
        zero: Tensor = f.zero_of(call["input"])
        if f.silence((call.get("weight"), call.get("bias")), channels(zero, n, 1)):
            return flat.expand(zero.shape) | zero
        return flat.expand(zero.shape) | (zero & clean)

    def live(self, f: Flow, n: fx.Node, out: Tensor) -> None:
        f.need_all(f.graph.calls[n]["input"]) if n in f.graph.pinned else f.need(f.graph.calls[n]["input"], out)


class GroupNorm(Rule):
    """Channels of a group share their statistics: they go together."""

    def link(self, g: Graph, n: fx.Node) -> None:
        call = g.calls[n]
        x, groups = call["input"], call["num_groups"]
        atoms = g.look(x)
        if not only_along(atoms, 1) or not varying(atoms) or g.computed(call, "weight", "bias"):
            PINNED.link(g, n)
            return
        g.atoms[n] = atoms
        inner = channels(atoms, x, 1)
        g.tie(inner.view(groups, -1), inner.view(groups, -1)[:, :1])
        for part in ("weight", "bias"):
            if call.get(part) is not None:
                g.tie(inner, g.axis(g.names[call[part]], 0))

    def zero(self, f: Flow, n: fx.Node) -> Tensor:
        call = f.graph.calls[n]
        if n in f.graph.pinned:
            return no(f.graph.atoms[n])
        zero, size = f.zero_of(call["input"]), shape_of(call["input"])[1]
        shift = torch.ones(size, dtype=torch.bool) if call.get("bias") is None else f.value(
            f.graph.names[call["bias"]]) == 0  # fmt: skip
        flat = torch.zeros(size, dtype=torch.bool) if call.get("weight") is None else f.value(
            f.graph.names[call["weight"]]) == 0  # fmt: skip
        inner = along(reduced(zero, _only(zero, 1), "all"), 1, size)
        if f.silence((call.get("weight"), call.get("bias")), inner):
            shift, flat = shift | inner, flat | inner
        whole = inner.view(call["num_groups"], -1).all(1, keepdim=True).expand(-1, size // call["num_groups"]).flatten()
        return reduced(onto(shift & (flat | whole), 1, zero.ndim), f.graph.atoms[n].shape, "all")

    def live(self, f: Flow, n: fx.Node, out: Tensor) -> None:
        call = f.graph.calls[n]
        if n in f.graph.pinned:
            f.need_all(call["input"])
            return
        size, groups = shape_of(n)[1], call["num_groups"]
        vector = along(out, 1, size).view(groups, -1).any(1, keepdim=True).expand(-1, size // groups).flatten()
        f.need(call["input"], onto(vector, 1, out.ndim))


class LayerNorm(Rule):
    """Mixes the last axes: channels that lie along them stay."""

    def link(self, g: Graph, n: fx.Node) -> None:
        call = g.calls[n]
        atoms = g.atoms[n] = g.look(call["input"])
        if g.computed(call, "weight", "bias") or any(
            d >= atoms.ndim - len(call["normalized_shape"]) for d in varying(atoms)
        ):
            g.pin(atoms)

    def zero(self, f: Flow, n: fx.Node) -> Tensor:
        call = f.graph.calls[n]
        zero = f.zero_of(call["input"])
        bias = call.get("bias")
        clean = bias is None or (bias in f.graph.names and not f.value(f.graph.names[bias]).any())
        return zero if clean else no(zero)

    def live(self, f: Flow, n: fx.Node, out: Tensor) -> None:
        axes = len(f.graph.calls[n]["normalized_shape"])
        f.need(f.graph.calls[n]["input"], out.any(tuple(range(out.ndim - axes, out.ndim)), keepdim=True))


class Embedding(Rule):
    """Looks up rows: the columns of the table are the channels."""

    def link(self, g: Graph, n: fx.Node) -> None:
        name = g.names.get(g.calls[n]["weight"])
        if name is None:
            g.atoms[n] = fixed(n)
            return
        g.atoms[n] = onto(g.axis(name, 1), len(shape_of(n)) - 1, len(shape_of(n)))

    def zero(self, f: Flow, n: fx.Node) -> Tensor:
        name, atoms = f.graph.names.get(f.graph.calls[n]["weight"]), f.graph.atoms[n]
        if name is None:
            return no(atoms)
        return reduced(onto((f.value(name) == 0).all(0), atoms.ndim - 1, atoms.ndim), atoms.shape, "all")

    def live(self, f: Flow, n: fx.Node, out: Tensor) -> None:
        pass


class Matmul(Rule):
    """The product of two activations, batched."""

    def link(self, g: Graph, n: fx.Node) -> None:
        a, b = self.operands(g, n)
        if min(len(shape_of(a)), len(shape_of(b))) < 2:
            PINNED.link(g, n)
            return
        ndim = len(shape_of(n))
        x, y = aligned(g.look(a), ndim), aligned(g.look(b), ndim)
        rows, columns = x.shape[-2] > 1, y.shape[-1] > 1
        for z, axis in ((x, -1), (y, -2)):
            if z.shape[axis] > 1:
                # The size of the contracted axis may be in a scale: it stays as it is, unless whole matrices go.
                g.tie(z, z.narrow(axis, 0, 1))
                if z.shape[:-2].numel() == 1:
                    g.pin(z)
        if rows and columns:
            PINNED.link(g, n)
            return
        left, right = x.narrow(-1, 0, 1), y.narrow(-2, 0, 1)
        if varying(left) and varying(right):
            g.tie(left, right)
        elif x.shape[-1] > 1 or y.shape[-2] > 1:
            g.pin(x)
            g.pin(y)
        chosen = right if len(varying(right)) >= len(varying(left)) else left
        g.atoms[n] = chosen

    def operands(self, g: Graph, n: fx.Node) -> tuple[fx.Node, fx.Node]:
        a, b = [v for v in g.calls[n].values() if isinstance(v, fx.Node)][-2:]
        return a, b

    def zero(self, f: Flow, n: fx.Node) -> Tensor:
        atoms = f.graph.atoms[n]
        a, b = self.operands(f.graph, n)
        if n in f.graph.pinned:
            return no(atoms)
        x, y = aligned(f.zero_of(a), atoms.ndim), aligned(f.zero_of(b), atoms.ndim)
        zero = (x.unsqueeze(-1) | y.unsqueeze(-3)).all(-2)
        return reduced(zero.expand(torch.broadcast_shapes(zero.shape, atoms.shape)), atoms.shape, "all")

    def live(self, f: Flow, n: fx.Node, out: Tensor) -> None:
        a, b = self.operands(f.graph, n)
        if n in f.graph.pinned:
            super().live(f, n, out)
            return
        x, y = aligned(f.zero_of(a), out.ndim), aligned(f.zero_of(b), out.ndim)
        f.need(a, (out.unsqueeze(-2) & ~y.unsqueeze(-3)).any(-1))
        f.need(b, (out.unsqueeze(-2) & ~x.unsqueeze(-1)).any(-3))


class Attention(Rule):
    """softmax(q kᵀ/√d) v: heads go whole, since d is in the scale."""

    def link(self, g: Graph, n: fx.Node) -> None:
        call = g.calls[n]
        q, k, v = (g.look(call[part]) for part in ("query", "key", "value"))
        shapes = [shape_of(call[part])[:-2] for part in ("query", "key", "value")]
        mask = call.get("attn_mask")
        along_tokens = any(x.shape[-2] > 1 for x in (q, k, v))
        if along_tokens or len(set(shapes)) > 1 or q.ndim < 3:
            PINNED.link(g, n)
            return
        for x in (q, k, v):
            g.tie(x, x.narrow(-1, 0, 1))
        head = q.narrow(-1, 0, 1)
        g.tie(head, k.narrow(-1, 0, 1))
        g.tie(head, v.narrow(-1, 0, 1))
        if isinstance(mask, fx.Node) and not blank(mask, q.ndim, varying(head)):
            g.pin(head)
        g.atoms[n] = v

    def zero(self, f: Flow, n: fx.Node) -> Tensor:
        zero = f.zero_of(f.graph.calls[n]["value"])
        return reduced(zero, f.graph.atoms[n].shape, "all") if (n not in f.graph.pinned) else no(f.graph.atoms[n])

    def live(self, f: Flow, n: fx.Node, out: Tensor) -> None:
        if n in f.graph.pinned:
            super().live(f, n, out)
            return
        call = f.graph.calls[n]
        f.need(call["value"], out)
        matters = (out & ~f.zero_of(call["value"])).any(-1, keepdim=True)
        for part in ("query", "key"):
            f.need(call[part], matters.expand(f.graph.look(call[part]).shape))


class Movement(Rule):
    """Moves data and changes none: executed on the positions of its inputs, which gives the index map."""

    def link(self, g: Graph, n: fx.Node) -> None:
        sources = self.sources(g, n)
        offset, places = 0, {}
        for x in sources:
            atoms = g.look(x)
            place = torch.arange(offset, offset + atoms.numel()).view(atoms.shape)
            places[x] = self.spread(g, n, place, shape_of(x))
            offset += atoms.numel()
        try:
            moved = self.move(n, fx.node.map_arg(g.calls[n], lambda x: places[x] if x in places else g.constant(x)))
        except (RuntimeError, TypeError, IndexError, NotImplementedError):
            Rule.link(self, g, n)
            g.maps[n] = None
            return
        flat = torch.cat([g.look(x).reshape(-1) for x in sources])
        maps = [compact(m) for m in _list(moved)]
        atoms = [flat[m] for m in maps]
        for a in atoms:
            if a.numel() == 1:  # one channel taken out of several: it is not there to be removed
                g.pin(a)
        several = isinstance(moved, list)
        g.maps[n], g.atoms[n] = (maps, atoms) if several else (maps[0], atoms[0])

    def sources(self, g: Graph, n: fx.Node) -> list[fx.Node]:
        """The tensors that are moved, each once."""
        first = next(iter(g.calls[n].values()))
        return list(dict.fromkeys(first if isinstance(first, (list, tuple)) else [first]))

    def spread(self, g: Graph, n: fx.Node, place: Tensor, shape: torch.Size) -> Tensor:
        return place.expand(shape)

    def move(self, n: fx.Node, call: dict[str, Any]) -> Any:
        """The operator, executed: on numbers of positions in place of its inputs."""
        target: Any = n.target
        if name_of(n) in ("view", "_unsafe_view"):
            return call["self"].reshape(call["size"])
        arguments = target._schema.arguments
        args = [call[a.name] for a in arguments if not a.kwarg_only]
        kwargs = {a.name: call[a.name] for a in arguments if a.kwarg_only and call[a.name] is not None}
        moved = target(*args, **kwargs)
        return list(moved) if isinstance(moved, (list, tuple)) else moved

    def _outputs(self, f: Flow, n: fx.Node) -> list[tuple[Tensor, Any]]:
        maps, atoms = f.graph.maps[n], f.graph.atoms[n]
        return list(zip(_list(maps), _list(atoms), strict=True))

    def zero(self, f: Flow, n: fx.Node) -> Any:
        if f.graph.maps[n] is None:
            return super().zero(f, n)
        flat = torch.cat([f.zero_of(x).reshape(-1) for x in self.sources(f.graph, n)])
        zeros = [flat[m] for m, _ in self._outputs(f, n)]
        return zeros if isinstance(f.graph.maps[n], list) else zeros[0]

    def live(self, f: Flow, n: fx.Node, out: Any) -> None:
        if f.graph.maps[n] is None:
            super().live(f, n, out)
            return
        sources = self.sources(f.graph, n)
        sizes = [f.graph.look(x).numel() for x in sources]
        needed = torch.zeros(sum(sizes), dtype=torch.bool)
        for (m, _), matters in zip(self._outputs(f, n), _list(out), strict=True):
            needed[m[matters.expand(m.shape)]] = True
        for x, part in zip(sources, needed.split(sizes), strict=True):
            f.need(x, part.view(f.graph.look(x).shape))

    def touched(self, g: Graph, n: fx.Node) -> list[int] | None:
        name, atoms = name_of(n), g.atoms[n]
        if isinstance(atoms, list):
            return varying(atoms[0])
        call = g.calls[n]
        if name in ("flatten", "permute", "transpose", "t", "cat", "concat", "unsqueeze", "squeeze", "movedim", "stack",
                    "numpy_T", "swapaxes", "ravel"):  # fmt: skip
            return None
        sizes: Any = call.get("size", call.get("shape", call.get("sizes")))
        if name in ("view", "reshape", "_unsafe_view", "expand") and isinstance(sizes, (list, tuple)):
            first = len(shape_of(n)) - len(sizes)
            return [d for d in varying(atoms) if sizes[d - first] != -1] or None
        if name == "unflatten":
            first = call["dim"] % len(shape_of(g.inputs(n)[0]))
            return [d for d in varying(atoms) if first <= d < first + len(sizes) and sizes[d - first] != -1] or None
        if name in ("slice", "select", "narrow", "flip", "roll", "index_select"):
            ndim = len(shape_of(g.inputs(n)[0]))
            axes = call.get("dims", call.get("dim", 0))
            axes = [d % ndim for d in (axes if isinstance(axes, (list, tuple)) else [axes])]
            return [d for d in varying(g.look(g.inputs(n)[0])) if d in axes] or None
        return varying(atoms)


class Concatenation(Movement):
    """Needs to be laid out only along axes that matter."""

    def spread(self, g: Graph, n: fx.Node, place: Tensor, shape: torch.Size) -> Tensor:
        axis = g.calls[n]["dim"] % len(shape)
        all_shapes = [g.look(x).shape for x in self.sources(g, n)]
        return place.expand([
            size if d == axis else max(s[d] for s in all_shapes) for d, size in enumerate(shape)
        ])  # fmt: skip


class Getitem(Rule):
    """One of several outputs."""

    def link(self, g: Graph, n: fx.Node) -> None:
        source, index = self._where(g, n)
        atoms = g.look(source)
        g.atoms[n] = atoms[index] if isinstance(atoms, list) else fixed(n)

    def _where(self, g: Graph, n: fx.Node) -> tuple[fx.Node, int]:
        source, index = list(g.calls[n].values())[:2]
        return source, index

    def zero(self, f: Flow, n: fx.Node) -> Any:
        source, index = self._where(f.graph, n)
        zero = f.zero_of(source)
        return zero[index] if isinstance(zero, list) else no(f.graph.atoms[n])

    def live(self, f: Flow, n: fx.Node, out: Tensor) -> None:
        source, index = self._where(f.graph, n)
        f.need_part(source, index, out)


class Padding(Rule):
    """New positions at the ends of axes. Along channels the output has atoms of its own: what is carried over may be
    zero in the input and written by others in the sum that follows (option-A shortcuts)."""

    def _amounts(self, g: Graph, n: fx.Node) -> dict[int, tuple[int, int]]:
        ndim, pad = len(shape_of(n)), g.calls[n]["pad"]
        return {
            ndim - 1 - i: (pad[2 * i], pad[2 * i + 1]) for i in range(len(pad) // 2) if pad[2 * i : 2 * i + 2] != [0, 0]
        }

    def link(self, g: Graph, n: fx.Node) -> None:
        x = g.calls[n]["self"]
        atoms = g.look(x)
        hit = [d for d in self._amounts(g, n) if d in varying(atoms)]
        if not hit:
            g.atoms[n] = atoms
            return
        if len(varying(atoms)) > 1 or g.calls[n].get("mode", "constant") != "constant":
            PINNED.link(g, n)
            return
        axis = hit[0]
        size = shape_of(x)[axis]
        source = torch.nn.functional.pad(torch.arange(size), self._amounts(g, n)[axis], value=-1)
        outer = g.new(len(source))
        g.pads[n] = Pad(source, channels(atoms, x, axis), outer)
        g.atoms[n] = onto(outer, axis, atoms.ndim)

    def zero(self, f: Flow, n: fx.Node) -> Tensor:
        zero, filled = f.zero_of(f.graph.calls[n]["self"]), not f.graph.calls[n].get("value")
        pad = f.graph.pads.get(n)
        if pad is None:
            atoms = f.graph.atoms[n]
            return zero & filled if zero.shape == atoms.shape else no(atoms)
        axis = varying(f.graph.atoms[n])[0]
        vector = torch.cat([along(zero, axis, len(pad.inner)), torch.tensor([filled])])
        return onto(vector[pad.source], axis, zero.ndim)

    def live(self, f: Flow, n: fx.Node, out: Tensor) -> None:
        x, pad = f.graph.calls[n]["self"], f.graph.pads.get(n)
        if pad is None:
            f.need(x, out) if out.shape == f.graph.look(x).shape else f.need_all(x)
            return
        axis = varying(f.graph.atoms[n])[0]
        vector = torch.zeros(len(pad.inner), dtype=torch.bool)
        carried = pad.source >= 0
        vector[pad.source[carried]] = along(out, axis, len(pad.source))[carried]
        f.need(x, onto(vector, axis, out.ndim))

    def touched(self, g: Graph, n: fx.Node) -> list[int] | None:
        return varying(g.atoms[n]) if n in g.pads else None


UNKNOWN, CONSTANT, PINNED = Rule(), Constant(), Pinned()

_SAME = (
    "relu relu6 leaky_relu tanh gelu silu mish elu selu celu hardswish softsign softshrink hardshrink tanhshrink rrelu "
    "abs neg negative sqrt square sin tan sinh asin atan asinh erf sign round floor ceil trunc frac nan_to_num dropout "
    "feature_dropout alpha_dropout feature_alpha_dropout clone contiguous detach detach_copy alias to _to_copy type_as "
    "float half double bfloat16 lift_fresh_copy positive expm1 log1p identity native_dropout dropout2d"
)
_OTHER = (
    "sigmoid hardsigmoid softplus exp exp2 log log2 log10 cos cosh acos rsqrt reciprocal log_sigmoid logsigmoid erfc "
    "eq ne lt le gt ge logical_not isnan isinf bitwise_not zeros_like ones_like full_like"
)
_SPATIAL = (
    "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
    "adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d upsample_nearest1d "
    "upsample_nearest2d upsample_nearest3d upsample_bilinear2d upsample_linear1d upsample_trilinear3d "
    "upsample_bicubic2d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d "
    "max_pool2d_with_indices"
)
_MOVEMENT = (
    "view reshape _unsafe_view flatten unflatten permute transpose t numpy_T swapaxes movedim squeeze unsqueeze expand "
    "slice select narrow split split_with_sizes chunk unbind index index_select flip roll repeat repeat_interleave "
    "tile pixel_shuffle pixel_unshuffle channel_shuffle unfold stack ravel expand_as view_as reshape_as diagonal"
)
_AFFINE = "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d linear"
_RULES: dict[str, Rule] = {
    **dict.fromkeys(_SAME.split(), Unary(True)),
    **dict.fromkeys(_OTHER.split(), Unary(False)),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max", "hardtanh", "clip"), Clamp()),
    **dict.fromkeys(("softmax", "log_softmax", "_softmax", "_log_softmax", "cumsum"), Softmax()),
    **dict.fromkeys(_SPATIAL.split(), Spatial()),
    **dict.fromkeys(("mean", "sum", "amax", "amin", "var", "std", "logsumexp", "max", "min", "norm"), Reduction()),
    **dict.fromkeys(("add", "sub", "rsub", "maximum", "minimum"), Binary("add")),
    **dict.fromkeys(("mul", "multiply"), Binary("mul")),
    **dict.fromkeys(("div", "true_divide", "divide"), Binary("div")),
    **dict.fromkeys(_MOVEMENT.split(), Movement()),
    **dict.fromkeys(("cat", "concat", "concatenate"), Concatenation()),
    **dict.fromkeys(_AFFINE.split(), Affine()),
    **dict.fromkeys(("batch_norm", "instance_norm"), Norm()),
    **dict.fromkeys(("layer_norm", "rms_norm"), LayerNorm()),
    **dict.fromkeys(("matmul", "mm", "bmm"), Matmul()),
    **dict.fromkeys(("argmax", "argmin", "topk", "sort", "baddbmm"), PINNED),
    "addmm": Addmm(),
    "prelu": Prelu(),
    "pow": Power(),
    "group_norm": GroupNorm(),
    "embedding": Embedding(),
    "scaled_dot_product_attention": Attention(),
    "pad": Padding(),
    "constant_pad_nd": Padding(),
    "getitem": Getitem(),
}  # fmt: skip


def find(g: Graph, n: fx.Node) -> Rule:
    """The rule for a node."""
    if n.target is operator.getitem:
        return _RULES["getitem"]
    reads, rule = g.inputs(n), _RULES.get(name_of(n), UNKNOWN)
    value = n.meta.get("val")
    whole = isinstance(value, Tensor) and not value.is_floating_point()  # indices and masks
    if not reads or ((rule is UNKNOWN or whole) and not any(a.any() for x in reads for a in _list(g.present(x)))):
        return CONSTANT
    if in_place(n) and isinstance(g.rules.get(reads[0]), (Movement, Getitem)):
        return UNKNOWN  # writing into a view changes what it is a view of
    return rule
