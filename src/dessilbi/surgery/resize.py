"""A network made narrower in place, as a plan says; the sizes that modules know of themselves follow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, fx, nn

from dessilbi.surgery.attention import HeadAttention
from dessilbi.surgery.nodes import call_of, name_of, nodes_in, owner, shape_of, varying
from dessilbi.surgery.plan import Cut, Plan
from dessilbi.surgery.rules import Affine, GroupNorm, Movement


class Rearranged(nn.Module):
    """A module, and its output's channels in another order: some twice, some not at all."""

    where: Tensor

    def __init__(self, module: nn.Module, index: Sequence[int], axis: int) -> None:
        super().__init__()
        self.module = module
        self.index = tuple(index)
        self.axis = axis
        self.register_buffer("where", torch.tensor(self.index), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.module(x)
        return y.index_select(self.axis, self.where)


def resize(model: nn.Module, plan: Plan, cuts: Mapping[str, Cut], *, adapt: bool) -> None:
    """Cut parameters and buffers and replace idle blocks.

    With `adapt`, whole numbers that a module of the user's keeps as attributes, and that its operators use as sizes
    which change, follow these (`self.new_channels` of a padded shortcut, `self.num_heads`).
    """
    numbers = _numbers(plan) if adapt else []
    for block in plan.blocks:
        model.set_submodule(block.path, block.replacement(model))
    for path in {path for path, _, _ in numbers}:
        module = model.get_submodule(path)
        changes = {old: new for where, old, new in numbers if where == path}
        for name, value in vars(module).items():
            if type(value) is int and value in changes:
                setattr(module, name, changes[value])
    for node in plan.nodes:
        if node in plan.graph.rewired:
            path, axis = owner(node)[0], varying(plan.graph.look(node))[0]
            model.set_submodule(path, Rearranged(model.get_submodule(path), plan.arrangement(node), axis))
    for path, width in plan.graph.attention.items():
        cut = cuts.get(f"{path}.in_proj_weight")
        if cut is not None:
            rows = cut.index.get(0, torch.arange(cut.shape[0]))
            heads = rows.view(3, -1, width)[0, :, 0] // width
            model.set_submodule(path, HeadAttention.of(model.get_submodule(path), heads.tolist()))  # type: ignore[arg-type]
    made: dict[int, Tensor] = {}
    for path, module in model.named_modules():
        for kind in (module._parameters, module._buffers):
            for key, t in kind.items():
                name = f"{path}.{key}" if path else key
                if t is None or (name not in cuts and id(t) not in made):
                    continue
                if id(t) not in made:
                    made[id(t)] = _cut(t, cuts[name])
                    made[id(made[id(t)])] = made[id(t)]
                kind[key] = made[id(t)]  # type: ignore[assignment]
        tell(module, {
            key: plan.groups(name)
            for key in ("weight",)
            if (name := f"{path}.{key}" if path else key) in plan.graph.grouped
        })  # fmt: skip


def _cut(t: Tensor, cut: Cut) -> Tensor:
    with torch.no_grad():
        new = cut(t.detach())
        if t.ndim in (4, 5):
            form = torch.channels_last if t.ndim == 4 else torch.channels_last_3d
            if t.is_contiguous(memory_format=form) and not t.is_contiguous():
                new = new.contiguous(memory_format=form)
        new = new.clone() if new.data_ptr() == t.data_ptr() else new
    return nn.Parameter(new, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else new


def tell(module: nn.Module, groups: Mapping[str, int]) -> None:
    """A module's own record of its sizes."""
    weight = getattr(module, "weight", None)
    if isinstance(module, nn.modules.conv._ConvNd):
        module.groups = groups.get("weight", module.groups)
        first, second = module.weight.shape[:2]
        module.in_channels, module.out_channels = (
            (first, second * module.groups) if module.transposed else (second * module.groups, first)
        )
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, (nn.modules.batchnorm._NormBase)):
        known = weight if weight is not None else module.running_mean
        if isinstance(known, Tensor):
            module.num_features = known.shape[0]
    elif isinstance(module, nn.GroupNorm) and isinstance(weight, Tensor):
        size = module.num_channels // module.num_groups
        module.num_channels, module.num_groups = weight.shape[0], weight.shape[0] // size
    elif isinstance(module, nn.Embedding):
        module.num_embeddings, module.embedding_dim = module.weight.shape
    elif isinstance(module, nn.PReLU):
        module.num_parameters = module.weight.shape[0]


def _numbers(plan: Plan) -> list[tuple[str, int, int]]:
    """Sizes in the network's code that change: module, old number, new one."""
    found: list[tuple[str, int, int]] = []
    for node in plan.suspects():
        path, _ = owner(node)
        rule, graph = plan.graph.rules[node], plan.graph
        pairs: list[tuple[int, int]] = []
        if node in graph.pads:
            pads = list(graph.calls[node]["pad"])
            d = varying(graph.look(node))[0]
            at = 2 * (len(shape_of(node)) - 1 - d)
            pairs = list(zip(pads[at : at + 2], plan.amounts(node), strict=True))
        elif isinstance(rule, Affine):
            name = graph.names[graph.calls[node]["weight"]]
            pairs = [(rule.groups(graph, node), plan.groups(name))]
        elif isinstance(rule, GroupNorm):
            size = shape_of(node)[1] // graph.calls[node]["num_groups"]
            channels = shape_of(node)[1], plan.shape(node)[1]
            pairs = [channels, (graph.calls[node]["num_groups"], channels[1] // size)]
        elif isinstance(rule, Movement) and name_of(node) in ("view", "reshape", "unflatten", "expand"):
            old, new = shape_of(node), plan.shape(node)
            pairs = [(old[d], new[d]) for d in rule.touched(graph, node) or ()]
        # Many a number is 0; only of a padding it is likely to be the size that changes.
        found += [(path, old, new) for old, new in pairs if old != new and (old or node in graph.pads)]
    return list(dict.fromkeys(found))


def harden(plan: Plan, nodes: Iterable[fx.Node]) -> None:
    """Take note of operators whose sizes cannot be changed: only the order of what a padding leaves can."""
    graph = plan.graph
    for node in nodes:
        if node in graph.pads and graph.is_module(node):
            graph.rewired.add(node)
        else:
            graph.hard.update(plan.borrowed(node) or [node])


def mismatched(plan: Plan, nodes: Iterable[fx.Node] | None) -> list[fx.Node]:
    """The suspects at which the narrower network, of these operators, does not do what the plan says; None where it
    could not be followed."""
    suspects = plan.suspects()
    if nodes is None:
        return [n for n in suspects if plan.borrowed(n)] or suspects
    nodes = [n for n in nodes if owner(n)[1] != Rearranged.__name__]
    olds, news = ([n for n in every if not plan.graph.in_attention(n)] for every in (plan.nodes, nodes))
    if len(olds) != len(news):
        return suspects
    for old, new in zip(olds, news, strict=True):
        if name_of(old) != name_of(new) or not _as_planned(plan, old, new):
            before = plan.nodes[: plan.nodes.index(old) + 1]
            return [old] if old in suspects else [n for n in suspects if n in before]
    return []


def _as_planned(plan: Plan, old: fx.Node, new: fx.Node) -> bool:
    """Whether an operator of the narrower network has the shape, and moves the channels, that the plan says."""
    graph, value = plan.graph, new.meta.get("val")
    if old in graph.rewired:
        return True
    shapes = enumerate(value) if isinstance(value, (list, tuple)) else [(0, value)]
    if not all(not isinstance(v, Tensor) or plan.shape(old, i) == v.shape for i, v in shapes):
        return False
    call = call_of(new, lambda n: n)
    if old in graph.pads:
        at = 2 * (len(shape_of(old)) - 1 - varying(graph.look(old))[0])
        return tuple(call["pad"][at : at + 2]) == plan.amounts(old)
    rule = graph.rules[old]
    if isinstance(rule, GroupNorm):
        size = shape_of(old)[1] // graph.calls[old]["num_groups"]
        return bool(call["num_groups"] * size == plan.shape(old)[1])
    if not isinstance(rule, Movement) or rule.touched(graph, old) is None or graph.maps[old] is None:
        return True
    offset, places = 0, {}
    for x in rule.sources(graph, old):
        atoms = graph.look(x)
        place = torch.arange(offset, offset + atoms.numel()).view(atoms.shape)
        places[x] = _narrowed(plan, place, atoms).expand(plan.shape(x))
        offset += atoms.numel()
    same = dict(zip(nodes_in(call), nodes_in(graph.calls[old]), strict=True))
    moved = rule.move(
        new,
        fx.node.map_arg(call, lambda n: places[same[n]] if same[n] in places else rule.given(graph, new, n, same[n])),
    )
    several = isinstance(moved, list)
    return all(
        torch.equal(m, _narrowed(plan, was, atoms).expand(m.shape))
        for m, was, atoms in zip(
            moved if several else [moved],
            graph.maps[old] if several else [graph.maps[old]],
            graph.look(old) if several else [graph.look(old)],
            strict=True,
        )
    )


def _narrowed(plan: Plan, x: Tensor, atoms: Tensor) -> Tensor:
    """What stays of a tensor that goes with these atoms."""
    for d, index in plan.places(atoms).items():
        x = x.index_select(d, index)
    return x
