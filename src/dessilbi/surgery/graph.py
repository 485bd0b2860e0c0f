"""The channel-space graph of a network: which positions of which tensors stand or fall together.

The network is exported once (torch.export), and every position of a tensor that could be removed gets an *atom*, a
number. Operators say how atoms travel: a convolution makes new ones for its output channels and ties the atoms of its
input to the second axis of its weight; addition ties the atoms of its operands; flatten, concatenation, slices and
every other movement of data are executed on the positions themselves, which gives an explicit index map. What is tied
is one *class*: all its positions are removed together or not at all. Class `FIXED` is never removed: inputs, outputs,
and whatever an operator cannot do without.

For every tensor the graph keeps the atoms in compact form: axes along which they do not change have size one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from dessilbi.surgery import rules
from dessilbi.surgery.attention import HeadAttention
from dessilbi.surgery.nodes import (
    Blocked,
    Grouped,
    Pad,
    call_of,
    in_place,
    inside,
    name_of,
    nodes_in,
    onto,
    owner,
    shape_of,
)

FIXED = 0

Inputs = Tensor | Sequence[Any] | Mapping[str, Any]


def call_arguments(example_inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments for the network."""
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, Sequence) and not isinstance(example_inputs, str):
        return tuple(example_inputs), {}
    raise TypeError(
        "example_inputs must be a tensor, a tuple of positional arguments or a dict of keyword arguments, got "
        f"{example_inputs!r} ({type(example_inputs).__name__})"
    )


@dataclass
class Graph:
    """The network's operators in order, with the atoms of every tensor.

    Attributes:
        nodes: the operators, in the order of execution.
        names: the parameter or buffer that a placeholder stands for.
        constants: the tensors written into the code.
        outputs: what the network returns.
        shapes: of parameters and buffers.
        calls: the arguments of every operator by name; a tensor that was written in place since is its latest writer.
        atoms: of every tensor, in compact form (a list of them where an operator returns several).
        maps: of every movement of data, for each output position the position in its (concatenated) inputs, -1: none.
        axes: (parameter, axis) -> the atoms along it.
        scattered: parameters that take part elementwise -> their atoms, in their own shape.
        attention: multi-head attentions that can lose heads, by their paths -> the width of a head.
        rigid: modules whose code checks the sizes of their own weights.
        pinned: operators that need all of their inputs.
        hard: operators whose sizes turned out to be written into the network's code: what they meet stays.
        needed: modules that the network's code needs as they are, even where they are nothing but a shortcut.
        rewired: paddings of that kind that are a module of their own, whose output can be put in order.
        classes: for every atom, the class it belongs to (named after its smallest atom).
    """

    nodes: list[fx.Node]
    names: dict[fx.Node, str]
    constants: dict[fx.Node, Tensor]
    outputs: list[fx.Node]
    shapes: dict[str, torch.Size]
    calls: dict[fx.Node, dict[str, Any]] = field(default_factory=dict)
    atoms: dict[fx.Node, Any] = field(default_factory=dict)
    maps: dict[fx.Node, Any] = field(default_factory=dict)
    axes: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    scattered: dict[str, Tensor] = field(default_factory=dict)
    grouped: dict[str, Grouped] = field(default_factory=dict)
    pads: dict[fx.Node, Pad] = field(default_factory=dict)
    blocked: list[Blocked] = field(default_factory=list)
    rules: dict[fx.Node, rules.Rule] = field(default_factory=dict)
    classes: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.long))
    attention: dict[str, int] = field(default_factory=dict)
    rigid: set[str] = field(default_factory=set)
    pinned: set[fx.Node] = field(default_factory=set)
    hard: set[fx.Node] = field(default_factory=set)
    needed: set[str] = field(default_factory=set)
    rewired: set[fx.Node] = field(default_factory=set)
    _ties: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _count: int = 1
    _linked: bool = False

    @classmethod
    def of(cls, model: nn.Module, example_inputs: Inputs) -> Graph:
        """Export the network in evaluation mode and link its tensors. The network is left as it was."""
        nodes, program = traced(model, example_inputs)
        _check_sizes(nodes)
        placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
        names, constants = {}, {}
        for spec in program.graph_signature.input_specs:
            node = placeholders.get(getattr(spec.arg, "name", ""))
            if node is not None and spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                names[node] = str(spec.target)
            elif node is not None and spec.kind == InputKind.CONSTANT_TENSOR:
                constants[node] = program.constants[str(spec.target)]
        returned = next(n for n in program.graph.nodes if n.op == "output")
        shapes = {
            name: t.shape
            for name, t in [
                *model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)
            ]
        }  # fmt: skip
        graph = cls(nodes, names, constants, nodes_in(returned.args), shapes)
        for path, module in model.named_modules():
            if HeadAttention.fits(module):
                graph.attention[path] = int(module.head_dim)  # type: ignore[arg-type]
            elif isinstance(module, nn.MultiheadAttention):
                graph.rigid.add(path)
        graph._link()
        return graph

    def _link(self) -> None:
        latest: dict[fx.Node, fx.Node] = {}

        def resolve(node: fx.Node) -> fx.Node:
            while node in latest:
                node = latest[node]
            return node

        for node in self.nodes:
            self.calls[node] = call_of(node, resolve)
            self.rules[node] = rules.find(self, node)
            self.rules[node].link(self, node)
            if in_place(node) and isinstance(node.args[0], fx.Node):
                latest[resolve(node.args[0])] = node
        self.outputs = [resolve(n) for n in self.outputs]
        for node in self.outputs:
            self.pin(self.look(node))
        self._find_classes()
        self._linked = True

    # -- what the rules ask and tell -----------------------------------------------------------------------------

    def inputs(self, node: fx.Node) -> list[fx.Node]:
        """The tensors that an operator reads."""
        return nodes_in(self.calls[node])

    def look(self, node: fx.Node) -> Any:
        """The atoms of a tensor; those of a parameter are made when it is first used elementwise."""
        if node in self.atoms:
            return self.atoms[node]
        shape = shape_of(node)
        name = self.names.get(node)
        if name is None or max(shape, default=1) == 1 or (self._linked and name not in self.scattered):
            return torch.zeros([1] * len(shape), dtype=torch.long)
        if name not in self.scattered:
            self.scattered[name] = self.new(shape.numel()).view(shape)
            for (known, axis), atoms in self.axes.items():
                if known == name:
                    self.tie(onto(atoms, axis, len(shape)), self.scattered[name])
        return self.scattered[name]

    def new(self, count: int) -> Tensor:
        """Fresh atoms; a single position is fixed, since a tensor has at least one."""
        if count == 1:
            return torch.zeros(1, dtype=torch.long)
        self._count += count
        return torch.arange(self._count - count, self._count)

    def axis(self, name: str, axis: int) -> Tensor:
        """The atoms along an axis of a parameter or buffer."""
        if (name, axis) not in self.axes:
            self.axes[name, axis] = self.new(self.shapes[name][axis])
            if name in self.scattered:
                self.tie(onto(self.axes[name, axis], axis, len(self.shapes[name])), self.scattered[name])
        return self.axes[name, axis]

    def tie(self, a: Tensor, b: Tensor) -> None:
        """These stand or fall together, position by position."""
        a, b = torch.broadcast_tensors(a, b)
        self._ties.append((a.reshape(-1), b.reshape(-1)))

    def pin(self, atoms: Any) -> None:
        """These stay."""
        for a in atoms if isinstance(atoms, list) else [atoms]:
            self.tie(a, torch.zeros(1, dtype=torch.long))

    def present(self, node: fx.Node) -> Any:
        """The atoms of a tensor, of a parameter only if it has some already."""
        name = self.names.get(node)
        return self.look(node) if name is None or name in self.scattered else torch.zeros(1, dtype=torch.long)

    def computed(self, call: dict[str, Any], *parts: str) -> bool:
        """Whether one of these arguments is not simply a parameter or buffer."""
        return any(call.get(part) is not None and call[part] not in self.names for part in parts)

    def constant(self, node: fx.Node) -> Tensor:
        """A tensor written into the code."""
        if node in self.constants:
            return self.constants[node]
        if node in self.calls and name_of(node) in ("lift_fresh_copy", "clone", "detach", "detach_", "to", "_to_copy"):
            return self.constant(self.inputs(node)[0])
        raise TypeError(f"{node.name} is not a constant")

    def is_module(self, node: fx.Node) -> bool:
        """Whether an operator's output is that of a module of its own."""
        path, _ = owner(node)
        return bool(path) and [n for n in self.nodes if inside(owner(n)[0], path)][-1] is node

    def in_attention(self, node: fx.Node) -> bool:
        """Whether an operator is one of a multi-head attention that can lose heads."""
        path = owner(node)[0]
        return any(inside(path, attention) for attention in self.attention)

    def block(self, node: fx.Node, atoms: Tensor) -> None:
        """An operator that is not known reads these."""
        self.blocked.append(Blocked(node, atoms))

    def _find_classes(self) -> None:
        root = torch.arange(self._count)
        if self._ties:
            a, b = (torch.cat([t[i] for t in self._ties]) for i in (0, 1))
            while not torch.equal(x := root[a], y := root[b]):
                root.scatter_reduce_(0, torch.maximum(x, y), torch.minimum(x, y), "amin")
                while not torch.equal(root, root[root]):
                    root = root[root]
        self.classes = root


def _check_sizes(nodes: Sequence[fx.Node]) -> None:
    for node in nodes:
        value = node.meta.get("val")
        tensors = value if isinstance(value, (list, tuple)) else [value]
        if any(type(n) is not int for t in tensors if isinstance(t, Tensor) for n in t.shape):
            path, kind = owner(node)
            raise ValueError(
                f"module {path!r} ({kind}) uses {node.target} to make a tensor whose size depends on the data: sizes "
                "may depend on the batch only; nothing was changed"
            )


def traced(model: nn.Module, example_inputs: Inputs) -> tuple[list[fx.Node], ExportedProgram]:
    """The network's operators in evaluation mode. The network is left as it was."""
    args, kwargs = call_arguments(example_inputs)
    training = [m for m in model.modules() if m.training]
    model.eval()
    log = logging.getLogger("torch._subclasses.fake_tensor")
    quiet, log.disabled = log.disabled, True  # what goes wrong is said below, once
    try:
        program = torch.export.export(model, args, kwargs, strict=False)
    except Exception as error:
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ValueError(
            f"the network could not be run with example_inputs of shape {_shapes(example_inputs)}: {first.strip()}; "
            "they must be what the network is called with, and torch.export must be able to follow its forward"
        ) from error
    finally:
        log.disabled = quiet
        for module in training:
            module.training = True
    return [n for n in program.graph.nodes if n.op == "call_function"], program


def _shapes(inputs: Inputs) -> str:
    args, kwargs = call_arguments(inputs)
    tensors = (*args, *kwargs.values())
    return ", ".join(str(tuple(t.shape)) if isinstance(t, Tensor) else type(t).__name__ for t in tensors)
