"""The batches of a run: small sets whole on the device, ImageNet streamed from files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dessilbi.data import Batches, ImageFolder, Stream, base, names, read
from dessilbi.training.config import Config

# Where a crop or a mirror image could be in the set itself.
_CROPPED = ("cifar10", "cifar100", "svhn")
_MIRRORED = ("cifar10", "cifar100", "fashion-mnist")


class Feed:
    """Batches, seen in two halves: tickets, which are small and cheap or come from workers, and :meth:`load`, which
    makes images and labels of a ticket on the device and can be captured in a CUDA graph."""

    def __init__(self, batches: Batches | Stream) -> None:
        self.batches = batches
        self.order = batches.order

    def __len__(self) -> int:
        return len(self.batches)

    def tickets(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """The tickets of an epoch, from batch number `start` on."""
        self.batches.set_epoch(epoch)
        return iter(self.batches.draws(start) if isinstance(self.batches, Batches) else self.batches.iterate(start))

    def load(self, ticket: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Images and labels."""
        if isinstance(self.batches, Batches):
            return self.batches.load(ticket)  # type: ignore[arg-type]
        images, labels = ticket
        return images, labels

    def size(self, step: int) -> int:
        """How many images batch number `step` of an epoch has, over all processes together."""
        return min(self.order.batch_size, self.order.count - step * self.order.batch_size)


class Data(NamedTuple):
    """What a run trains and is evaluated on."""

    train: Feed
    test: Feed
    num_classes: int
    shape: tuple[int, int, int]


def build(config: Config, device: torch.device, dtype: torch.dtype, rank: int = 0, world_size: int = 1) -> Data:
    """The two splits of the data set that the configuration names."""
    shared: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "channels_last": config.channels_last,
        "rank": rank,
        "world_size": world_size,
    }
    # Each process gets a whole number of images of each full batch.
    evaluated = max(world_size, config.eval_batch // world_size * world_size)
    if config.data == "imagenet":
        root = Path(config.data_root)
        root = root / "imagenet" if (root / "imagenet").is_dir() else root
        channels, size, width = config.input_shape or (3, 224, 224)
        if channels != 3 or size != width:
            raise ValueError(f"input_shape={config.input_shape}: imagenet has coloured squares, such as [3, 224, 224]")
        folder = ImageFolder(root, "train", size=size, augment=config.crop, seed=config.seed)
        held_out = ImageFolder(root, "val", size=size)
        stream = Stream(folder, config.batch, shuffle=True, workers=config.workers, **shared)
        val = Stream(held_out, evaluated, workers=config.workers, **shared)
        return Data(Feed(stream), Feed(val), folder.num_classes, folder.shape)
    whole = base(config.data)
    if whole not in names():
        from difflib import get_close_matches

        known = [*names(), "imagenet"]
        near = get_close_matches(whole, known, n=1)
        advice = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(known)}"
        raise ValueError(f"data={config.data!r}: {advice}")
    train, test = (read(config.data, config.data_root, split) for split in ("train", "test"))
    if config.input_shape is not None:
        train = train.fitted(config.input_shape)
        test = test.fitted(config.input_shape, train.mean, train.std)
    batches = Batches(
        train,
        config.batch,
        shuffle=True,
        crop=4 if config.crop and whole in _CROPPED else 0,
        flip=config.flip and whole in _MIRRORED,
        seed=config.seed,
        **shared,
    )
    return Data(Feed(batches), Feed(Batches(test, evaluated, **shared)), train.num_classes, train.shape)
