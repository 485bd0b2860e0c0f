"""What a path keeps of one tensor: which groups changed at every point, their norms, the last |V| of single weights."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dessilbi.coupling import Channels
from dessilbi.groups import Partition, Slices, transposed_filters

_LEVEL = 1
_DROPPED_BITS = 23 - 4

# How filters lie in a weight, unless the convolution is a transposed one.
ROWS = Slices((0,), kind="filter")


class Codes(NamedTuple):
    """|V| of every weight: the exponent and the first four bits of the mantissa, counted down from the largest.

    That one has code 255, and `top` for these bits. Code 1 is nearly 16 octaves below; what is smaller has code 0.
    """

    codes: Tensor
    top: Tensor

    @classmethod
    def of(cls, v: Tensor) -> Codes:
        bits = v.flatten().float().abs().view(torch.int32).bitwise_right_shift_(_DROPPED_BITS)
        top = bits.max() if bits.numel() else bits.new_zeros(())
        return cls(bits.sub_(top - 255).clamp_min_(0).to(torch.uint8), top)

    def values(self) -> np.ndarray:
        bits = np.arange(256, dtype=np.int32) + (int(self.top) - 255)
        middles = ((bits << _DROPPED_BITS) + (1 << (_DROPPED_BITS - 1))).astype(np.int32).view(np.float32)
        middles[(bits <= 0) | (np.arange(256) == 0)] = 0
        values: np.ndarray = middles[self.codes.cpu().numpy()]
        return values


@dataclass
class Track:
    """What is recorded of one tensor."""

    kind: str
    shape: tuple[int, ...]
    groups: int
    changes: list[bytes] = field(default_factory=list)
    norms: list[np.ndarray] = field(default_factory=list)
    # How the groups and the filters lie in the tensor, so that a file is enough to make masks; None: not known.
    cut: Slices | None = None
    filters: Slices = ROWS
    codes: Codes | None = None
    # Of channel groups: which of the families of tensors that share groups, and the joint group of each filter.
    joint: tuple[int, list[int]] | None = None

    def flips(self) -> Iterator[np.ndarray]:
        """The numbers of the groups that entered or left, at every point."""
        return map(_decode, self.changes)

    def supports(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The support at every point (one array, changing) and which groups changed there."""
        support = np.zeros(self.groups, dtype=bool)
        for flips in self.flips():
            support[flips] ^= True
            yield support, flips

    def outward(self, values: np.ndarray) -> Tensor:
        """One value a group, as the optimizer's `support` shapes it."""
        out = torch.from_numpy(values)
        return out.view(self.shape) if self.kind == "weight" else out

    def arrays(self) -> dict[str, np.ndarray]:
        """What goes into a file as arrays."""
        arrays: dict[str, np.ndarray] = {
            "changes": np.frombuffer(b"".join(self.changes), dtype=np.uint8),
            "lengths": np.array([len(c) for c in self.changes], dtype=np.int64),
        }
        if self.norms:
            arrays["norms"] = np.stack(self.norms)
        if self.codes is not None:
            arrays["codes"] = np.frombuffer(_deflated(self.codes.codes), dtype=np.uint8)
        return arrays

    def described(self) -> dict[str, Any]:
        """What goes into the header of a file."""
        return {"kind": self.kind, "shape": self.shape, "groups": self.groups, "cut": _described(self.cut),
                "filters": _described(self.filters), "joint": self.joint,
                "top": None if self.codes is None else int(self.codes.top)}  # fmt: skip

    @classmethod
    def of(cls, described: dict[str, Any], i: int, arrays: dict[str, np.ndarray]) -> Track:
        """The record of the tensor that is number `i` in a file."""
        groups, lengths = described["groups"], arrays[f"{i}.lengths"]
        data, ends = arrays[f"{i}.changes"].tobytes(), np.cumsum(lengths)
        changes = [data[end - n : end] for end, n in zip(ends, lengths, strict=True)]
        track = cls(described["kind"], tuple(described["shape"]), groups, changes, list(arrays.get(f"{i}.norms", ())))
        if "filters" in described:
            track.cut, track.filters = _slices(described["cut"]), _slices(described["filters"]) or ROWS
            if track.cut is not None and track.cut.count(track.shape) != groups:
                raise ValueError(f"{described['name']} has {groups} groups, not {track.cut.count(track.shape)}")
        if described.get("joint") is not None:
            family, numbers = described["joint"]
            if len(numbers) != groups:
                raise ValueError(f"{described['name']} has {len(numbers)} joint groups for {groups} filters")
            track.joint = (int(family), [int(n) for n in numbers])
        if described.get("top") is not None:
            codes = np.frombuffer(zlib.decompress(arrays[f"{i}.codes"].tobytes()), dtype=np.uint8)
            if codes.size != groups or not 0 <= described["top"] < 1 << (31 - _DROPPED_BITS):
                raise ValueError(f"{described['name']} has {codes.size} magnitudes up to {described['top']}")
            track.codes = Codes(torch.from_numpy(codes.copy()), torch.tensor(described["top"], dtype=torch.int32))
        for flips in track.flips():
            if flips.size and flips[-1] >= groups:
                raise ValueError(f"{described['name']} has no group {flips[-1]}")
        return track


def encode(flips: np.ndarray) -> bytes:
    """Ascending numbers as deflated gaps."""
    more, rest = np.divmod(np.diff(flips, prepend=-1) - 1, 255)
    gaps = np.full(int(more.sum()) + rest.size, 255, dtype=np.uint8)
    gaps[np.cumsum(more + 1) - 1] = rest
    return zlib.compress(gaps.tobytes(), _LEVEL)


def _decode(change: bytes) -> np.ndarray:
    gaps = np.frombuffer(zlib.decompress(change), dtype=np.uint8)
    ends = np.cumsum(gaps, dtype=np.int64)[gaps < 255]
    return ends + np.arange(ends.size)


def _described(slices: Slices | None) -> list[Any] | None:
    return None if slices is None else [list(slices.axes), slices.fold]


def _slices(described: list[Any] | None) -> Slices | None:
    return None if described is None else Slices(tuple(described[0]), described[1])


def _deflated(codes: Tensor) -> bytes:
    # What is one byte like the other, in whatever order, has no repetitions to look for.
    deflate = zlib.compressobj(_LEVEL, strategy=zlib.Z_HUFFMAN_ONLY)
    return deflate.compress(codes.cpu().numpy().tobytes()) + deflate.flush()


def cut(part: Partition) -> Slices | None:
    """How the groups of a tensor lie in it, if they are slices."""
    lie = part.filters if isinstance(part, Channels) else part
    return lie if isinstance(lie, Slices) else None


def filters(model: nn.Module) -> dict[int, Slices]:
    """How filters lie in the weights (by their id) of transposed convolutions; in all others along the first axis."""
    return {
        id(p): transposed_filters(module.groups)
        for module in model.modules()
        if isinstance(module, nn.modules.conv._ConvTransposeNd)
        for name, p in module.named_parameters(recurse=False)
        if name == "weight"
    }
