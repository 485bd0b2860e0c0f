"""Which images make up batch i of epoch e on process r: the same everywhere, from the seed alone."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


def generator(*key: int) -> torch.Generator:
    """A CPU generator seeded from all of ``key``, such as (seed, epoch); neighbouring keys are unrelated."""
    digest = hashlib.blake2b(",".join(map(str, key)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))


@dataclass(frozen=True)
class Order:
    """The order of ``count`` images in batches of ``batch_size``, shared by ``world_size`` processes.

    ``batch_size`` counts the images of all processes together: batch i, joined over the ranks in their order,
    is batch i of a single process. The last batch of an epoch may be smaller, and is then shared as evenly as
    possible.
    """

    count: int
    batch_size: int
    shuffle: bool = False
    seed: int = 0
    drop_last: bool = False
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size}: must be at least 1")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank={self.rank}: must be from 0 to world_size - 1 = {self.world_size - 1}")
        if self.batch_size % self.world_size:
            raise ValueError(
                f"batch_size={self.batch_size} counts all processes together and cannot be shared by "
                f"{self.world_size}: choose a multiple of {self.world_size}"
            )
        if len(self) == 0:
            raise ValueError(
                f"batch_size={self.batch_size} with drop_last leaves no batch of {self.count} images: "
                "choose a smaller one, or drop_last=False"
            )

    def __len__(self) -> int:
        whole, rest = divmod(self.count, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def indices(self, source: torch.Generator) -> Tensor:
        """The images of an epoch in the order of use."""
        return torch.randperm(self.count, generator=source) if self.shuffle else torch.arange(self.count)

    def slices(self, start: int) -> Iterator[slice]:
        """This process's part of each batch from ``start`` on, as slices of :meth:`indices`."""
        if not 0 <= start <= len(self):
            raise ValueError(f"start={start}: must be from 0 to the number of batches, {len(self)}")
        return map(self._slice, range(start, len(self)))

    def _slice(self, step: int) -> slice:
        first = step * self.batch_size
        size = min(self.batch_size, self.count - first)
        return slice(first + size * self.rank // self.world_size, first + size * (self.rank + 1) // self.world_size)
