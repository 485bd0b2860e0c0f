"""``Stream``: mini-batches of images that do not fit in memory, with the interface of :class:`Batches`."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from .folder import ImageFolder
from .order import Order, generator
from .pixels import Normalise


class _Parts(Sampler[list[int]]):
    """This process's part of each batch, for the epoch and the first batch set on it."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.epoch = self.start = 0

    def __iter__(self) -> Iterator[list[int]]:
        index = self.order.indices(generator(self.order.seed, self.epoch))
        return (index[part].tolist() for part in self.order.slices(self.start))

    def __len__(self) -> int:
        return len(self.order) - self.start


def _stack(shape: tuple[int, int, int], items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """One batch, which may be empty: a process's part of a last batch of fewer images than processes."""
    images = [image for image, _ in items] or [torch.empty(0, dtype=torch.uint8)]
    labels = torch.tensor([label for _, label in items], dtype=torch.int64)
    return torch.stack(images).view(-1, *shape), labels


class Stream:
    """Mini-batches of an :class:`ImageFolder`: worker processes decode and crop, the device normalises.

        stream = Stream(ImageFolder("imagenet", "train"), 256, device="cuda", shuffle=True, workers=12)
        stream.set_epoch(3)
        for images, labels in stream: ...

    As with :class:`Batches`, what an epoch delivers follows from (seed, epoch) alone, whatever the number of
    workers or processes, and may be taken up at any batch. The seed is that of the folder. Images travel to
    the device as ``uint8``, a quarter of the bytes.

    Args:
        folder: the images.
        workers: processes that decode; 0 decodes in this one. As many as there are CPU cores for this process
            is a good start: a core decodes and crops some hundreds of ImageNet images a second.

    The other arguments are those of :class:`Batches`.
    """

    def __init__(
        self,
        folder: ImageFolder,
        batch_size: int,
        *,
        device: torch.device | str = "cpu",
        shuffle: bool = False,
        workers: int = 4,
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.order = Order(len(folder), batch_size, shuffle, folder.seed, drop_last, rank, world_size)
        self.device = torch.device(device)
        self._folder = folder
        self._parts = _Parts(self.order)
        self._loader: DataLoader[tuple[Tensor, int]] = DataLoader(
            folder,
            batch_sampler=self._parts,
            collate_fn=partial(_stack, folder.shape),
            num_workers=workers,
            pin_memory=self.device.type == "cuda",
            persistent_workers=workers > 0,
            # Its own generator: a DataLoader otherwise draws from the global one at the start of every epoch.
            generator=torch.Generator(),
        )
        self._normalise = Normalise(
            folder.mean, folder.std, device=self.device, dtype=dtype, channels_last=channels_last
        )

    @property
    def epoch(self) -> int:
        return self._parts.epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration goes through; iterating does not advance it."""
        self._parts.epoch = epoch
        self._folder.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.iterate()

    def iterate(self, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of the epoch, (images, labels), from number ``start`` on."""
        self.order.slices(start)  # refuses a wrong start here, not in the middle of the loader
        self._parts.start = start
        return map(self._load, iter(self._loader))

    def _load(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images, labels = (part.to(self.device, non_blocking=True) for part in batch)
        return self._normalise(images), labels
