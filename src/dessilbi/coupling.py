"""Groups that span tensors: `channels` joins the filters that write the same channels of a residual stream into one
group each, with one norm and one decision.

What needs the norms of such groups, or counts them, asks for several tensors at once, with `joint_norms` and `tally`;
tensors with groups of their own go through the same two functions.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dessilbi.groups import Groups, Number, Partition, Shape, Slices, entry, partition


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
    rows = Slices((0,), kind="filter")
    given = [(tuple(shape), rows if part is None else part, index) for shape, part, index in members]
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


def partitions(group: Groups, shapes: Sequence[Shape]) -> list[Partition | None]:
    """The partitions that `group` names for tensors of these shapes, checked: one kind for all, or a list of them."""
    if isinstance(group, (list, tuple)) and len(group) != len(shapes):
        raise ValueError(f"group has {len(group)} entries for {len(shapes)} parameters: give one each, or one for all")
    found = [partition(entry(group, i), shape) for i, shape in enumerate(shapes)]
    families([part for part in found if part is not None])
    return found
