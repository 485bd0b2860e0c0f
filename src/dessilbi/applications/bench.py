"""The runs that the methods of a comparison share: trained when first asked for, once, and gone on with if cut off."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dessilbi.applications import tickets
from dessilbi.applications.schedules import finetuning, ticket_training
from dessilbi.selection import Selection
from dessilbi.surgery import profile
from dessilbi.ticket import Ticket
from dessilbi.training import datasets, network, randomness, train
from dessilbi.training.config import Config
from dessilbi.training.distribution import find_device
from dessilbi.training.run import Run

# As many as SNIP's authors take of ten classes, ten times over.
_IMAGES = 1000

Note = Callable[[str], object]


class Found(NamedTuple):
    """What a method has found, and what it cost."""

    selection: Selection
    run: Run
    """Whose weights the ticket starts from."""
    epoch: int
    """The one of that run at whose end it was found; 0 is before the first."""
    steps: int
    """Training steps that it took, of all runs together."""


class Bench:
    """One data set, one seed, one folder.

    Args:
        folder: where the runs lie.
        search: the configuration of the DessiLBI run that looks for tickets; its seed is the bench's, and what is
            sparse in it (`conv`, `linear`, `exclude`) is what all methods prune. It is stopped as early as it is asked.
        epochs: of the final training, which is also how long dense networks are trained.
        rewind: the epoch to whose weights tickets go back; None: they go on from where they were found, fine-tuned.
        points: epochs that methods will ask for; checkpoints of these stay.
        source: the bench of the data set that tickets are brought from.
        note: is told what is trained.

    Several processes may work in one folder: a run is trained by one of them, and the others wait for it.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        search: Config,
        epochs: int,
        rewind: int | None = tickets.REWIND,
        points: tuple[int, ...] = (),
        source: Bench | None = None,
        note: Note = lambda _: None,
    ) -> None:
        self.folder = FilePath(folder)
        self.search_config = search
        self.epochs, self.rewind = epochs, rewind
        self.points = points
        self.source = source
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

    def dense(self, until: int | None = None) -> Run:
        """The dense network, trained up to an epoch or to the end."""
        return self.run("dense", self.training_config, until)

    def search(self, until: int) -> Run:
        """DessiLBI up to the end of an epoch."""
        if until > self.search_config.epochs:
            raise ValueError(
                f"epoch {until} is after the end of the search, which has epochs={self.search_config.epochs}"
            )
        return self.run("dessilbi", self.search_config, until)

    def settled(self, keep: float, allocation: str | None = None) -> Run:
        """DessiLBI up to the epoch at which the selection of this fraction has settled."""
        name = "dessilbi-settled-" + (f"{allocation}-" if allocation else "") + f"{keep:g}"
        config = self.search_config.replace(settle_keep=keep, settle_allocation=allocation or "none")
        return self.run(name, config)

    def train(self, name: str, ticket: Ticket, until: int | None = None) -> Run:
        """A ticket, trained up to an epoch or to the end; with `rewind` None, fine-tuned."""
        config = finetuning(self.search_config, self.epochs) if self.rewind is None else self.training_config
        config = config.replace(ticket="ticket.safetensors")
        return self.run(name, config, until, lambda made: ticket.save(made.ticket_file))

    def run(
        self, name: str, config: Config, until: int | None = None, write: Callable[[Run], object] | None = None
    ) -> Run:
        """A run of this configuration, trained up to an epoch or to its end, with the checkpoints that are asked for.

        `write` gives a new folder the files that the configuration names.
        """
        from filelock import FileLock

        if config.ticket is None:
            if until is not None:
                # Tickets that were found before go back to there all the same.
                until = max(until, self.rewind or 0, 1)
            kept = {0, *self.points, *(() if self.rewind is None else (self.rewind,))}
            config = config.replace(keep_epochs=tuple(sorted(epoch for epoch in kept if epoch <= config.epochs)))
        config = config.replace(keep_checkpoints=1)
        folder = self.folder / name
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            run = Run.open(folder) if (folder / "config.toml").is_file() else None
            if run is not None and _lacks(run, config):
                run = None
            if run is not None and _is_done(run, until):
                return run
            self.note(f"{folder}: {'training' if run is None else 'goes on'}")
            if run is None:
                run = Run.create(folder, config, folder.exists(), write)
            train(config, folder, resume=True, until=until, command="compare")
        return Run.open(folder)

    def check(self) -> None:
        """Raise what reading the data of any run would, before anything is trained."""
        if self.source is not None:
            self.source.check()
        _ = self._data

    # -- what methods need beside runs ---------------------------------------------------------------------------

    def network(self, weights: Mapping[str, Tensor] | None = None) -> nn.Module:
        """The network with these weights, or with the initial ones, on the CPU."""
        randomness.seed_all(self.seed)
        model = network.build(self.search_config, self._data, torch.device("cpu"))
        if weights is not None:
            model.load_state_dict(dict(weights))
        return model.eval()

    @property
    def images(self) -> tuple[Tensor, Tensor]:
        """The first thousand images of training, as the first epoch draws them, and their labels."""
        drawn: list[tuple[Tensor, Tensor]] = []
        for draw in self._data.train.tickets(0):
            drawn.append(self._data.train.load(draw))
            if sum(len(labels) for _, labels in drawn) >= _IMAGES:
                break
        images, labels = (torch.cat(parts) for parts in zip(*drawn, strict=True))
        return images[:_IMAGES], labels[:_IMAGES]

    @property
    def macs(self) -> int:
        """Multiply-adds of the dense network for one image."""
        return profile(self.network(), torch.zeros(1, *self._data.shape)).macs

    @property
    def steps_per_epoch(self) -> int:
        return len(self._data.train)

    def ticket(self, found: Found, **facts: Any) -> Ticket:
        """What was found, with the weights that it starts from."""
        epoch = found.epoch if self.rewind is None else self.rewind
        state = found.run.latest() if epoch >= len(found.run.metrics()) else found.run.at_epoch(epoch)
        assert state is not None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the comparison says what is lost
            return tickets.made(
                found.selection,
                state["model"],
                found.run.config,
                at=found.epoch,
                rewind=self.rewind,
                run=str(found.run.folder),
                **facts,
            )

    @cached_property
    def _data(self) -> datasets.Data:
        find_device(self.search_config.device)
        return datasets.build(self.training_config, torch.device("cpu"), torch.float32)


def _lacks(run: Run, config: Config) -> bool:
    """Whether a checkpoint is asked for that the run went past."""
    done, kept = len(run.metrics()), set(run.kept_epochs())
    return any(epoch not in kept for epoch in config.keep_epochs if epoch <= done and (epoch or done))


def _is_done(run: Run, until: int | None) -> bool:
    return run.status == "finished" or (until is not None and run.status == "paused" and len(run.metrics()) >= until)
