"""What is sparse: partitions of a tensor into groups, their norms and the proximal map.

A partition cuts one tensor into disjoint groups; the penalty is the sum of the groups' Euclidean norms,
Ω_λ(Γ) = λ Σ_g ‖Γ_g‖ (for single elements: λ‖Γ‖₁), and its proximal map shrinks every group towards zero:

    Prox_λ(V)_g = V_g · max(0, 1 − λ/‖V_g‖)

All the rest of the library asks a partition four things: the `split` view of a tensor, the `norms` of its groups,
how to `spread` one number a group back over the elements, and how many groups there are (`count`). A partition of
your own is a subclass that answers them; `Labels` covers every partition that can be written as an integer tensor.

Groups may span tensors: `channels` joins the filters that write the same channels of a residual stream into one group
each, with one norm and one decision. What needs the norms of such groups, or counts them, asks for several tensors
at once, with `joint_norms` and `tally`; tensors with groups of their own go through the same two functions.
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Number = float | Tensor
Shape = Sequence[int]
Group: TypeAlias = "str | Partition | None"
Groups: TypeAlias = "Group | Sequence[Group]"

KINDS = ("weight", "filter", "neuron", "input", "layer")


class Partition(ABC):
    """How a tensor is cut into groups. `norms` and `spread` speak of the tensor's `split` view."""

    kind: str
    coupling: Coupling | None = None

    @abstractmethod
    def check(self, shape: Shape) -> None:
        """Raise a ValueError if a tensor of this shape cannot be cut this way."""

    @abstractmethod
    def count(self, shape: Shape) -> int:
        """The number of groups."""

    @abstractmethod
    def sizes(self, shape: Shape) -> Number:
        """The number of elements of a group: one number if all are equal, else a tensor like `norms`."""

    @abstractmethod
    def norms(self, x: Tensor) -> Tensor:
        """‖x_g‖ for every group of a split view, in a shape that `spread` takes."""

    def split(self, x: Tensor) -> Tensor:
        """A view of `x` in which groups are easy to address."""
        return x

    def spread(self, values: Tensor) -> Tensor:
        """One value a group, broadcastable against the split view."""
        return values

    def flat(self, values: Tensor, shape: Shape) -> Tensor:
        """One value a group, as the user sees it: 1-D, or like the tensor where groups are its elements."""
        return values.reshape(-1)

    def shares(self, x: Tensor) -> Tensor:
        """Norms of those parts of the groups that lie in this tensor: `norms`, unless groups span tensors."""
        return self.norms(x)

    def distinct(self, values: Tensor) -> Tensor:
        """Of one value a group, those that stand for themselves here: all, unless groups span tensors."""
        return values

    def describe(self) -> dict[str, int | str]:
        """Plain data that tells this partition from others (it is what a state_dict carries)."""
        return {"kind": self.kind}

    def threshold(self, lam: Number, shape: Shape, size_normalised: bool = False) -> Number:
        """λ, or λ√|g| where λ is to mean the same for groups of every size."""
        if not size_normalised:
            return lam
        size = self.sizes(shape)
        return lam * (size.sqrt() if isinstance(size, Tensor) else math.sqrt(size))

    def prox(self, v: Tensor, threshold: Number, norms: Tensor | None = None) -> Tensor:
        """Prox of the group penalty on a split view; a group of norm zero stays zero, never NaN."""
        return self.spread(shrinkage(self.norms(v) if norms is None else norms, threshold)) * v


def shrinkage(norms: Tensor, threshold: Number) -> Tensor:
    """max(0, 1 − λ/‖·‖), the factor by which the proximal map shrinks a group: positive exactly where ‖·‖ > λ."""
    return (norms - threshold).clamp_min_(0) / norms.clamp_min(torch.finfo(norms.dtype).tiny)


@dataclass(frozen=True)
class Elements(Partition):
    """Every element is a group: soft thresholding."""

    kind = "weight"

    def check(self, shape: Shape) -> None:
        pass

    def count(self, shape: Shape) -> int:
        return math.prod(shape)

    def sizes(self, shape: Shape) -> Number:
        return 1

    def norms(self, x: Tensor) -> Tensor:
        return x.abs()

    def flat(self, values: Tensor, shape: Shape) -> Tensor:
        return values.reshape(tuple(shape))

    def prox(self, v: Tensor, threshold: Number, norms: Tensor | None = None) -> Tensor:
        if isinstance(threshold, Tensor) or threshold > torch.finfo(v.dtype).max:
            return torch.copysign((v.abs() - threshold).clamp_min_(0), v)
        return torch.nn.functional.softshrink(v, threshold)  # the same in one pass; takes finite numbers only


@dataclass(frozen=True)
class Slices(Partition):
    """Groups are the slices along `axes` of the tensor: all elements that share their indices there are one group.

    `axes=(0,)` are the filters of a convolution and the rows of a linear weight, `(1,)` the columns, `()` the whole
    tensor. A transposed convolution stores its weight as (in, out/G, …) with the G convolution groups along the
    first axis: `fold=G` unfolds that axis to (G, in/G) and the filters are the axes (0, 2) of the result.
    """

    axes: tuple[int, ...]
    fold: int = 1
    kind: str = "slices"

    def check(self, shape: Shape) -> None:
        need = max(self.axes, default=0) + 1 - (self.fold > 1)
        # A bias has an output axis too, but no filters: what asks for filters of a vector is a mistake.
        if self.axes:
            need = max(need, 2)
        if len(shape) < need:
            raise ValueError(
                f"group={self.kind!r} needs a tensor of at least {need} dimensions, got shape {tuple(shape)}; "
                "leave it out (group=None) or choose 'weight' or 'layer'"
            )
        if self.fold > 1 and shape[0] % self.fold:
            raise ValueError(
                f"group={self.kind!r} with {self.fold} convolution groups does not fit shape {tuple(shape)}: "
                f"{shape[0]} input channels are not divisible by {self.fold}"
            )

    def _split_shape(self, shape: Shape) -> tuple[int, ...]:
        return (self.fold, shape[0] // self.fold, *shape[1:]) if self.fold > 1 else tuple(shape)

    def count(self, shape: Shape) -> int:
        split = self._split_shape(shape)
        return math.prod(split[a] for a in self.axes)

    def sizes(self, shape: Shape) -> Number:
        split = self._split_shape(shape)
        return math.prod(n for a, n in enumerate(split) if a not in self.axes)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self.fold, -1)) if self.fold > 1 else x

    def norms(self, x: Tensor) -> Tensor:
        reduced = [a for a in range(x.ndim) if a not in self.axes]
        if not reduced:
            return x.abs()
        norms: Tensor = torch.linalg.vector_norm(x, dim=reduced, keepdim=True)
        return norms

    def describe(self) -> dict[str, int | str]:
        return {"kind": self.kind, "axes": ",".join(map(str, self.axes)), "fold": self.fold}


class Labels(Partition):
    """A partition written out: `index` has the tensor's shape and holds every element's group, 0 … groups−1."""

    kind = "labels"

    def __init__(self, index: Tensor) -> None:
        if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
            raise ValueError(f"index must hold integers, got {index.dtype}")
        if index.numel() == 0 or int(index.min()) < 0:
            raise ValueError("index must be non-empty and hold group numbers 0, 1, …: negative or no entries found")
        self.index = index.detach().long()
        self._sizes = torch.bincount(self.index.flatten())
        if int(self._sizes.min()) == 0:
            empty = int((self._sizes == 0).nonzero()[0])
            raise ValueError(f"index skips group {empty}: number the groups 0 … groups−1 without gaps")

    def _on(self, device: torch.device) -> Tensor:
        if self.index.device != device:
            self.index, self._sizes = self.index.to(device), self._sizes.to(device)
        return self.index

    def check(self, shape: Shape) -> None:
        if tuple(shape) != tuple(self.index.shape):
            raise ValueError(f"group=Labels of shape {tuple(self.index.shape)} does not fit a tensor of {tuple(shape)}")

    def count(self, shape: Shape) -> int:
        return self._sizes.numel()

    def sizes(self, shape: Shape) -> Number:
        return self._sizes

    def norms(self, x: Tensor) -> Tensor:
        squares = x.new_zeros(self._sizes.numel())
        return squares.index_add_(0, self._on(x.device).flatten(), x.square().flatten()).sqrt_()

    def spread(self, values: Tensor) -> Tensor:
        spread: Tensor = values[self._on(values.device)]
        return spread

    def describe(self) -> dict[str, int | str]:
        crc = zlib.crc32(self.index.cpu().contiguous().numpy().tobytes())
        return {"kind": self.kind, "groups": self._sizes.numel(), "crc": crc}


class Coupling:
    """What the `Channels` of several tensors share: which filters form the joint groups 0 … groups−1.

    Filters are numbered through all tensors, in the order of their members. Every joint group counts once, where its
    first filter is.
    """

    def __init__(self, index: Sequence[Tensor], sizes: Sequence[Tensor]) -> None:
        of = torch.cat(list(index))
        counts = torch.bincount(of)
        self.groups = counts.numel()
        self.lengths = [len(i) for i in index]
        # Row c holds the filters of joint group c; short rows end in the number of none. Gathered by rows and not
        # added up by index: that is as fast, and on a GPU the sum does not change from run to run.
        self._table = torch.full((self.groups, int(counts.max())), len(of))
        order = of.argsort(stable=True)
        column = torch.arange(len(of)) - (counts.cumsum(0) - counts)[of[order]]
        self._table[of[order], column] = order
        joint = torch.zeros(self.groups, dtype=torch.long).index_add_(0, of, torch.cat(list(sizes)))
        self._of, self._sizes = of, joint[of]
        first = torch.zeros(len(of), dtype=torch.bool)
        first[self._table[:, 0]] = True
        self._first: list[Tensor] = [mine.nonzero().flatten() for mine in first.split(self.lengths)]

    def _on(self, device: torch.device) -> None:
        if self._of.device != device:
            self._table, self._of, self._sizes = (t.to(device) for t in (self._table, self._of, self._sizes))
            self._first = [t.to(device) for t in self._first]

    def join(self, shares: Sequence[Tensor]) -> list[Tensor]:
        """The norms of the joint groups, given for every filter, from the norms of the filters of every member."""
        devices = {x.device for x in shares}
        if len(devices) > 1:
            raise ValueError(
                f"group='channel': tensors that share groups lie on {', '.join(sorted(map(str, devices)))}; "
                "put them on one device, or choose 'filter'"
            )
        self._on(devices.pop())
        filters = torch.cat([*[x.reshape(-1) for x in shares], shares[0].new_zeros(1)])
        norms = torch.linalg.vector_norm(filters[self._table], dim=1)[self._of]
        return [n.view(x.shape).to(x.dtype) for n, x in zip(norms.split(self.lengths), shares, strict=True)]

    def sizes(self, member: int) -> Tensor:
        """The number of elements of the joint group of every filter of a member."""
        sizes: Tensor = self._sizes.split(self.lengths)[member]
        return sizes

    def first(self, member: int) -> Tensor:
        """Which filters of a member are the first of their joint group."""
        return self._first[member]


class Channels(Partition):
    """One tensor's filters as parts of groups that span tensors; `channels` makes them, for all these tensors at once.

    Values are given one a filter, and equal for all filters of a joint group: `norms` are the joint ones, which take
    all the tensors to know (`joint_norms`), `sizes` count the elements of all of them, and the proximal map shrinks
    the filters of a group by one factor. Under magnitude scaling n_j is the joint norm of W, and ρ is counted over
    the joint groups of the coupling, each once. Where λ is given one a parameter, coupled parameters take the same.
    """

    kind = "channel"
    coupling: Coupling

    def __init__(self, coupling: Coupling, member: int, filters: Partition, index: Tensor, shape: Shape) -> None:
        self.coupling = coupling
        self.member = member
        self.filters = filters
        self.index = index
        self.shape = tuple(shape)
        meta = torch.empty(self.shape, device="meta")
        self._spread_shape = filters.norms(filters.split(meta)).shape

    def __repr__(self) -> str:
        return f"Channels({self.member + 1} of {len(self.coupling.lengths)} tensors, {self.coupling.groups} groups)"

    def check(self, shape: Shape) -> None:
        if tuple(shape) != self.shape:
            raise ValueError(f"group=Channels made for a tensor of {self.shape} does not fit one of {tuple(shape)}")

    def count(self, shape: Shape) -> int:
        return len(self.index)

    def sizes(self, shape: Shape) -> Number:
        return self.coupling.sizes(self.member).view(self._spread_shape)

    def split(self, x: Tensor) -> Tensor:
        return self.filters.split(x)

    def norms(self, x: Tensor) -> Tensor:
        raise TypeError("the norms of channel groups span tensors: ask joint_norms, with all of them")

    def shares(self, x: Tensor) -> Tensor:
        return self.filters.norms(x)

    def spread(self, values: Tensor) -> Tensor:
        return self.filters.spread(values)

    def distinct(self, values: Tensor) -> Tensor:
        return values.flatten()[self.coupling.first(self.member)]

    def describe(self) -> dict[str, int | str]:
        crc = zlib.crc32(self.index.contiguous().numpy().tobytes())
        of = {f"filter_{key}": value for key, value in self.filters.describe().items()}
        members = len(self.coupling.lengths)
        return {"kind": self.kind, "groups": self.coupling.groups, "members": members, "member": self.member,
                "crc": crc, **of}  # fmt: skip


def channels(members: Iterable[tuple[Shape, Partition | None, Tensor]]) -> list[Channels]:
    """Join filters of several tensors into groups that span them.

    Args:
        members: for every tensor its shape, how it is cut into filters (`Slices((0,), kind="filter")`,
            `transposed_filters(…)`; None: the slices along the first axis), and an integer tensor with the joint group
            of each of its filters. Joint groups are numbered 0, 1, … without gaps over all members together; one may
            hold several filters of a tensor, or a single one.

    Returns:
        One partition a tensor, in the same order, for param groups `{"params": […], "group": […]}`: all in one group.
    """
    given = [(tuple(shape), _NAMED["filter"] if part is None else part, index) for shape, part, index in members]
    if not given:
        raise ValueError("members is empty: give (shape, filters, index) for at least one tensor")
    indices, sizes = [], []
    for i, (shape, part, numbers) in enumerate(given):
        if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
            raise ValueError(f"members[{i}]: index must hold integers, got {numbers.dtype}")
        if part.coupling is not None:
            raise ValueError(f"members[{i}]: filters must be a partition of one tensor, got {part!r}")
        part.check(shape)
        count = part.count(shape)
        if tuple(numbers.shape) != (count,):
            raise ValueError(
                f"members[{i}]: index of shape {tuple(numbers.shape)} for the {count} filters of a tensor of {shape}; "
                "give one joint group for each filter"
            )
        index = numbers.detach().cpu().long().clone()
        if count and int(index.min()) < 0:
            raise ValueError(f"members[{i}]: index must hold group numbers 0, 1, …, got {int(index.min())}")
        indices.append(index)
        sizes.append(torch.as_tensor(part.sizes(shape), dtype=torch.long).cpu().flatten().expand(count))
    counts = torch.bincount(torch.cat(indices))
    if not counts.all():
        empty = int((counts == 0).nonzero()[0])
        raise ValueError(f"no member has joint group {empty}: number the groups 0 … groups−1 without gaps")
    if not counts.numel():
        raise ValueError("members have no filters at all: leave them out")
    coupling = Coupling(indices, sizes)
    return [
        Channels(coupling, i, part, index, shape)
        for i, ((shape, part, _), index) in enumerate(zip(given, indices, strict=True))
    ]


def families(partitions: Sequence[Partition]) -> list[list[int]]:
    """Which of several tensors have groups in common: the places of coupled ones together, of all others one by one.

    A coupling must be there with all its tensors.
    """
    found: list[list[int]] = []
    coupled: dict[Coupling, dict[int, int]] = {}
    for place, part in enumerate(partitions):
        if not isinstance(part, Channels):
            found.append([place])
        elif part.coupling not in coupled:
            coupled[part.coupling] = {part.member: place}
        elif part.member in coupled[part.coupling]:
            raise ValueError(f"group={part!r} is given to two parameters; each needs its own")
        else:
            coupled[part.coupling][part.member] = place
    for coupling, places in coupled.items():
        if len(places) < len(coupling.lengths):
            raise ValueError(
                f"group='channel': {len(places)} of the {len(coupling.lengths)} tensors that share these groups are "
                "here; put them all into one param group, with group=[…] one a parameter"
            )
        found.append([places[member] for member in range(len(places))])
    return found


def joint_norms(partitions: Sequence[Partition], tensors: Iterable[Tensor]) -> list[Tensor]:
    """The norms of the groups of several tensors, each shaped as `spread` takes them; coupled ones must all be here."""
    norms = [part.shares(part.split(x)) for part, x in zip(partitions, tensors, strict=True)]
    for places in families(partitions):
        coupling = partitions[places[0]].coupling
        if coupling is not None:
            for place, joint in zip(places, coupling.join([norms[i] for i in places]), strict=True):
                norms[place] = joint
    return norms


def tally(partitions: Sequence[Partition], values: Sequence[Tensor]) -> list[Tensor]:
    """How many groups have a value that is not zero, a number for every tensor; coupled ones have theirs in common."""
    counts = [torch.count_nonzero(part.distinct(x)) for part, x in zip(partitions, values, strict=True)]
    for places in families(partitions):
        if len(places) > 1:
            together = torch.stack([counts[i] for i in places]).sum()
            for i in places:
                counts[i] = together
    return counts


def transposed_filters(conv_groups: int = 1) -> Slices:
    """The output channels of a transposed convolution with that many convolution groups."""
    if conv_groups < 1:
        raise ValueError(f"conv_groups must be at least 1, got {conv_groups}")
    return Slices((1,), kind="filter") if conv_groups == 1 else Slices((0, 2), fold=conv_groups, kind="filter")


_NAMED: dict[str, Partition] = {
    "weight": Elements(),
    "filter": Slices((0,), kind="filter"),
    "neuron": Slices((0,), kind="neuron"),
    "input": Slices((1,), kind="input"),
    "layer": Slices((), kind="layer"),
}


def partition(group: Group, shape: Shape) -> Partition | None:
    """The partition that `group` names for a tensor of this shape, checked; None means: not penalised.

    `group="auto"`, what plain parameters get: filters for tensors of three or more dimensions, weights for matrices,
    nothing for the rest.
    """
    if group is None:
        return None
    if group == "auto":
        group = "filter" if len(shape) >= 3 else "weight" if len(shape) == 2 else None
        return _NAMED[group] if group else None
    if isinstance(group, str):
        if group not in _NAMED:
            raise ValueError(f"unknown group={group!r}: choose one of {', '.join(KINDS)}, a Partition, or None")
        found: Partition = _NAMED[group]
    elif isinstance(group, Partition):
        found = group
    else:
        raise TypeError(f"group must be a name, a Partition or None, got {group!r} ({type(group).__name__})")
    found.check(shape)
    return found


def entry(group: Groups, i: int) -> Group:
    """What `group` says of parameter i: its own entry where they are listed, else what holds for all."""
    return group if group is None or isinstance(group, (str, Partition)) else group[i]


def partitions(group: Groups, shapes: Sequence[Shape]) -> list[Partition | None]:
    """The partitions that `group` names for tensors of these shapes, checked: one kind for all, or a list of them."""
    if isinstance(group, (list, tuple)) and len(group) != len(shapes):
        raise ValueError(f"group has {len(group)} entries for {len(shapes)} parameters: give one each, or one for all")
    found = [partition(entry(group, i), shape) for i, shape in enumerate(shapes)]
    families([part for part in found if part is not None])
    return found
