"""``Batches``: mini-batches of an :class:`ImageSet` that lives on the device as ``uint8``."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .images import ImageSet
from .order import Order, generator
from .pixels import Normalise, augment


class Draw(NamedTuple):
    """What chance decides about a batch: which images, where to crop them, which to mirror. On the device."""

    indices: Tensor
    offsets: Tensor
    flips: Tensor


class Batches:
    """Mini-batches of a whole set on the device: gather, crop, flip and normalise, a batch at a time.

        batches = Batches(train, 128, device="cuda", shuffle=True, crop=4, flip=True, seed=0)
        batches.set_epoch(3)
        for images, labels in batches: ...

    There are no worker processes and no copies from the host inside an epoch: at its start the order, the
    crop offsets and the flips of all its images are drawn on the CPU and sent to the device, then nothing
    waits for the device. What is drawn follows from (seed, epoch) alone, so every device and every number of
    processes sees the same batches, and an epoch taken up at batch k (``iterate(start=k)``) goes on exactly
    as it would have.

    The whole set is kept as ``uint8``: 154 MB for CIFAR-10's training split. For sets that do not fit use
    :class:`~dessilbi.data.Stream`.

    With a CUDA graph, capture :meth:`load` together with the step and copy each draw into the captured one's
    tensors::

        held = Draw(*(drawn.clone() for drawn in next(batches.draws())))
        with torch.cuda.graph(graph): images, labels = batches.load(held); ...
        for draw in batches.draws():
            for old, new in zip(held, draw): old.copy_(new)
            graph.replay()

    (use ``drop_last=True``: a graph has fixed shapes).

    Args:
        images: the set.
        batch_size: over all processes together.
        device: where the set is kept and the batches are made.
        shuffle: a new order every epoch; otherwise the order of the set.
        crop: padding of the random crop; 0 for none.
        flip: mirror half of the images.
        dtype, channels_last: of the images delivered. Labels are ``int64``.
        drop_last: leave out the last batch of an epoch if it is smaller.
        rank, world_size: this process and how many there are; each gets its part of every batch.
    """

    def __init__(
        self,
        images: ImageSet,
        batch_size: int,
        *,
        device: torch.device | str = "cpu",
        shuffle: bool = False,
        crop: int = 0,
        flip: bool = False,
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if crop < 0:
            raise ValueError(f"crop={crop}: the padding of the random crop must be 0 (no crop) or more")
        self.order = Order(len(images), batch_size, shuffle, seed, drop_last, rank, world_size)
        self.device = torch.device(device)
        self.crop, self.flip = crop, flip
        self.epoch = 0
        self._images = images.images.to(self.device).contiguous()
        self._labels = images.labels.to(self.device)
        self._normalise = Normalise(
            images.mean, images.std, device=self.device, dtype=dtype, channels_last=channels_last
        )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration goes through; iterating does not advance it."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.iterate()

    def iterate(self, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of the epoch, (images, labels), from number ``start`` on."""
        return map(self.load, self.draws(start))

    def draws(self, start: int = 0) -> Iterator[Draw]:
        """What :meth:`load` turns into the batches of the epoch, from number ``start`` on."""
        source = generator(self.order.seed, self.epoch)
        index, count = self.order.indices(source), self.order.count
        offsets = torch.randint(2 * self.crop + 1, (count, 2), generator=source)
        flips = torch.randint(2, (count,), generator=source) > 0 if self.flip else torch.zeros(count, dtype=torch.bool)
        epoch = Draw(*(drawn.to(self.device) for drawn in (index, offsets, flips)))
        return (Draw(*(drawn[part] for drawn in epoch)) for part in self.order.slices(start))

    def load(self, draw: Draw) -> tuple[Tensor, Tensor]:
        """The images and labels of a draw: a function of it alone, that never waits for the device."""
        images = self._images.index_select(0, draw.indices)
        if self.crop or self.flip:
            images = augment(images, draw.offsets, draw.flips, self.crop)
        return self._normalise(images), self._labels.index_select(0, draw.indices)
