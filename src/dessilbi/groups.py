"""What is sparse: partitions of a tensor into groups, their norms and the proximal map.

A partition cuts one tensor into disjoint groups; the penalty is the sum of the groups' Euclidean norms,
Ω_λ(Γ) = λ Σ_g ‖Γ_g‖ (for single elements: λ‖Γ‖₁), and its proximal map shrinks every group towards zero:

    Prox_λ(V)_g = V_g · max(0, 1 − λ/‖V_g‖)

All the rest of the library asks a partition four things: the `split` view of a tensor, the `norms` of its groups,
how to `spread` one number a group back over the elements, and how many groups there are (`count`). A partition of
your own is a subclass that answers them; `Labels` covers every partition that can be written as an integer tensor.

Groups may span tensors: :mod:`dessilbi.coupling` joins them.
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dessilbi.coupling import Coupling

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


def description(group: Groups) -> Any:
    """`group` in plain values, for files."""
    if isinstance(group, (list, tuple)):
        return [description(one) for one in group]
    return group.describe() if isinstance(group, Partition) else group
