"""The runs that the methods of a comparison share: trained when first asked for, once, and gone on with if cut off."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import Tensor, nn

from dessilbi.applications import tickets
from dessilbi.applications.schedules import finetuning, ticket_training
from dessilbi.selection import Selection
from dessilbi.ticket import Ticket
from dessilbi.training import datasets, step, train
from dessilbi.training.config import Config
from dessilbi.training.distribution import find_device
from dessilbi.training.opening import network_of
from dessilbi.training.run import Run

Note = Callable[[str], object]


class Bench:
    """One data set, one seed, one folder.

    Args:
        folder: where the runs lie.
        search: the configuration of the DessiLBI run that looks for tickets; its seed is the bench's, and what is
            sparse in it (`conv`, `linear`, `exclude`) is what all methods prune. It is stopped as early as it is asked.
        epochs: of the final training, which is also how long dense networks are trained.
        rewind: the epoch to whose weights tickets go back; None: they go on from where they were found, fine-tuned.
        note: is told what is trained.

    Several processes may work in one folder: a run is trained by one of them, and the others wait for it.
    """

    def __init__(
        self, folder: str | os.PathLike[str], search: Config, epochs: int, rewind: int | None, note: Note = lambda _: None
    ) -> None:
        self.folder = FilePath(folder)
        self.search_config = search
        self.epochs, self.rewind = epochs, rewind
        self.note = note

    @property
    def seed(self) -> int:
        return self.search_config.seed

    @property
    def training_config(self) -> Config:
        """How a dense network is trained, and a ticket, but for its file."""
        return ticket_training(self.search_config, self.epochs)

    @property
    def sparse(self) -> dict[str, Any]:
        """What is pruned, as the baselines ask for it."""
        conv, linear = (None if k == "none" else k for k in (self.search_config.conv, self.search_config.linear))
        return {"conv": conv, "linear": linear, "exclude": self.search_config.exclude}

    # -- runs ----------------------------------------------------------------------------------------------------

    def dense(self, at: Iterable[int] = ()) -> Run:
        """The dense network, trained to the end, with checkpoints of these epochs."""
        return self.run("dense", self.training_config, at=at)

    def search(self, at: int) -> Run:
        """DessiLBI up to the end of an epoch."""
        if at > self.search_config.epochs:
            raise ValueError(f"epoch {at} is after the end of the search, which has epochs={self.search_config.epochs}")
        return self.run("dessilbi", self.search_config, at=[at], until=at)

    def settled(self, keep: float) -> Run:
        """DessiLBI up to the epoch at which the selection of this fraction has settled."""
        return self.run(f"dessilbi-settled-{keep:g}", self.search_config.replace(settle_keep=keep))

    def train(self, name: str, ticket: Ticket) -> Run:
        """A ticket, trained; with `rewind` None, fine-tuned."""
        file = self.folder / f"{name}.ticket"
        file.parent.mkdir(parents=True, exist_ok=True)
        ticket.save(file)
        config = self.training_config if self.rewind is not None else finetuning(self.search_config, self.epochs)
        config = tickets.transferred(ticket, config)
        return self.run(name, config.replace(ticket=str(file)))

    def run(self, name: str, config: Config, at: Iterable[int] = (), until: int | None = None) -> Run:
        """A run of this configuration, trained up to an epoch or to its end, with checkpoints of the epochs `at` and
        of the one to rewind to."""
        from filelock import FileLock

        folder = self.folder / name
        folder.parent.mkdir(parents=True, exist_ok=True)
        rewind = () if self.rewind is None else (self.rewind,)
        config = config.replace(keep_epochs=tuple(sorted({*at, *rewind})), keep_checkpoints=1)
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            run, anew = self._there(folder, config)
            if run is not None and not anew and (until is None or run.metrics()) and _is_done(run, until):
                return run
            self.note(f"{folder}: {'goes on' if run is not None and not anew else 'training'}")
            if run is not None:
                config = config.replace(keep_epochs=tuple(sorted({*config.keep_epochs, *run.config.keep_epochs})))
            train(config, folder, resume=run is not None and not anew, overwrite=anew, until=until, command="compare")
        return Run.open(folder)

    @staticmethod
    def _there(folder: FilePath, config: Config) -> tuple[Run | None, bool]:
        """The run in a folder, and whether it must be trained anew for want of a checkpoint that is gone."""
        if not (folder / "config.toml").is_file():
            return None, False
        run = Run.open(folder)
        done = len(run.metrics())
        kept = set(run.kept_epochs())
        return run, any(epoch <= done and epoch not in kept for epoch in config.keep_epochs)

    # -- what they need beside runs ------------------------------------------------------------------------------

    def network(self, weights: dict[str, Tensor]) -> nn.Module:
        """The network with these weights, on the CPU."""
        model, _ = network_of(self.dense_or_search(), weights)
        model.load_state_dict(weights)
        return model

    def dense_or_search(self) -> Run:
        """Any run of the network that is there, for its shape."""
        return Run(self.folder / "dense", self.training_config)

    def weights(self, run: Run, at: int | None = None) -> dict[str, Tensor]:
        """The weights of a run at the end of an epoch, or of the last."""
        state = run.latest() if at is None else run.at_epoch(at)
        assert state is not None
        weights: dict[str, Tensor] = state["model"]
        return weights

    def ticket(self, sel: Selection, run: Run, at: float, **facts: Any) -> Ticket:
        """A ticket of a selection that was made at an epoch of a run, with the weights of that run to rewind to."""
        end = at if at < run.config.epochs else None
        weights = self.weights(run, int(at) if end is not None else None) if self.rewind is None else None
        if weights is None:
            weights = self.weights(run, self.rewind)
        return tickets.made(sel, weights, run.config, at=at, rewind=self.rewind, run=str(run.folder), **facts)

    @cached_property
    def images(self) -> tuple[Tensor, Tensor]:
        """The first thousand images of training and more, as the first epoch draws them, and their labels."""
        config = self.training_config
        device = find_device(config.device)
        data = datasets.build(config, device, step.DTYPES["float32"])
        drawn, count = [], 0
        for ticket in data.train.tickets(0):
            drawn.append(data.train.load(ticket))
            count += len(drawn[-1][1])
            if count >= 1000:
                break
        images, labels = zip(*drawn, strict=True)
        return torch.cat(images).float().cpu(), torch.cat(labels).cpu()


def _is_done(run: Run, until: int | None) -> bool:
    if run.status == "finished":
        return True
    return until is not None and run.status == "paused" and len(run.metrics()) >= until
