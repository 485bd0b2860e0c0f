"""Winning tickets by early stopping: a few epochs of DessiLBI say which weights to keep, SGD trains them.

    train(search, "runs/search", until=5)                # search.keep_epochs has 2 and 5
    ticket = find(Run.open("runs/search"), at=5, keep=0.06, rewind=2)
    ticket.save("vgg16.ticket")
    summary = train(training(ticket, epochs=160).replace(ticket="vgg16.ticket"), "runs/ticket")

The selection at an early epoch is masked onto the weights that the run had at the end of epoch `rewind`, by default 2,
and trained by SGD on the paper's schedule with everything else at zero throughout.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

from torch import Tensor

from dessilbi.applications.moment import Moment
from dessilbi.applications.schedules import ticket_training
from dessilbi.baselines.paths import selected
from dessilbi.selection import Selection
from dessilbi.ticket import Ticket
from dessilbi.training.config import Config
from dessilbi.training.environment import commit
from dessilbi.training.opening import network_of
from dessilbi.training.run import Run

REWIND = 2


def find(
    run: Run,
    *,
    at: int | None = None,
    keep: float | None = None,
    allocation: str | None = None,
    rewind: int | None = REWIND,
) -> Ticket:
    """The ticket that a run of DessiLBI has found by the end of an epoch.

    Args:
        run: needs the checkpoints of both epochs: train it with ``keep_epochs=[rewind, at]``.
        at: the epoch; None is the last there is, so where a run stopped that `settle_keep` stopped.
        keep: the fraction of groups to keep; None keeps the support of Γ.
        allocation: how much of it each layer gets, see :func:`~dessilbi.baselines.paths.selected`.
        rewind: the epoch at whose end the weights are taken, 0 for the initial ones; None takes those of `at`: then
            the ticket is a pruned network, to be fine-tuned.
    """
    moment = moment_of(run, at)
    sel = selected(moment.path, keep, allocation)
    weights = moment.weights if rewind is None else run.at_epoch(rewind)["model"]
    return made(sel, weights, run.config, method="dessilbi", at=moment.epoch, rewind=rewind, run=str(run.folder))


def moment_of(run: Run, at: int | None = None) -> Moment:
    """A run of DessiLBI at the end of an epoch, or where it is."""
    Moment.check(run, at)
    state = run.latest() if at is None else run.at_epoch(at)
    if state is None:
        raise ValueError(f"{run.folder}: has no checkpoint yet: let it train for an epoch")
    model, shape = network_of(run, state["model"])
    return Moment.of(run, model, shape or (), at)


def made(sel: Selection, weights: Mapping[str, Tensor], config: Config, **facts: Any) -> Ticket:
    """A ticket that a run of this configuration led to, with its provenance."""
    if lost := emptied(sel):
        warnings.warn(
            f"nothing is kept of {', '.join(lost)}: what it feeds has nothing to learn from; keep more, or allocate by "
            "layer",
            stacklevel=3,
        )
    known = {"data": config.data, "keep": sel.keep, "seed": config.seed, "commit": commit()}
    return Ticket(sel, weights, {**known, **facts, "config": config.to_dict()})


def emptied(sel: Selection) -> list[str]:
    """The tensors of which not one weight is kept: the ruin of most networks, unless whole layers are selected."""
    return [name for name, mask in sel.items() if not mask.any()] if sel.level == "weight" else []


def training(ticket: Ticket, epochs: int = 160, data: str | None = None) -> Config:
    """How a ticket is trained, to be completed by ``ticket=FILE``: as in the paper, on its own data or on others.

    Other data are brought to what the ticket's network takes: its channels, and at least its height and width.
    """
    if "config" not in ticket.facts:
        raise ValueError("the ticket does not say how it was found (facts['config']): give a configuration of your own")
    config = ticket_training(Config.from_dict(ticket.facts["config"]), epochs)
    return config if data is None else config.replace(data=data, input_shape=common_shape(config, data))


def common_shape(source: Config, data: str) -> tuple[int, ...] | None:
    """The `input_shape` that lets the network of a run take other data: its channels, the larger height and width."""
    own, other = source.input_shape or shape_of(source.data), shape_of(data)
    if own is None or other is None or own == other:
        return source.input_shape
    return (own[0], *(max(a, b) for a, b in zip(own[1:], other[1:], strict=True)))


def shape_of(data: str) -> tuple[int, ...] | None:
    """Channels, height and width of a data set's images; None where only its files know."""
    from dessilbi.data import base, describe, names

    return describe(data).shape if base(data) in names() else None


def load(file: str | os.PathLike[str]) -> Ticket:
    """A ticket, from its file or from the folder of a run that trains it."""
    return Ticket.load(file_of(file))


def file_of(place: str | os.PathLike[str]) -> FilePath:
    """The file of a ticket, which may be in the folder of a run."""
    found = FilePath(place)
    return Run.open(found).ticket_file if found.is_dir() else found
