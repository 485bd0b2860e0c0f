"""The methods of a comparison, by name: each finds a selection at a bench; the training of what is left is shared.

A name may go on with an allocation (how much each layer gets, see :mod:`dessilbi.baselines.allocation`) and with an
epoch (when the selection is made, in every round of iterative pruning): ``dessilbi@5``, ``magnitude-lamp``,
``magnitude-lamp@5``, ``iterative-erk``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, NamedTuple

from torch import Tensor, nn

from dessilbi.applications import tickets
from dessilbi.applications.bench import Bench, Found
from dessilbi.baselines import (
    ALLOCATIONS,
    iterative,
    magnitude,
    random_global,
    random_like,
    slim,
    snip,
)
from dessilbi.baselines.paths import selected
from dessilbi.selection import Selection
from dessilbi.training.config import Config
from dessilbi.training.run import Run

# The weights of penalties: what their authors take for image networks.
_L1, _BREGMAN = 1e-4, 1e-2


class Method(NamedTuple):
    """A method, as its name says."""

    kind: str
    allocation: str | None = None
    at: int | None = None

    @classmethod
    def parse(cls, name: str) -> Method:
        """What a name says; a ValueError where it says nothing."""
        rest, _, epoch = name.partition("@")
        if epoch and not re.fullmatch(r"[1-9]\d*", epoch):
            raise ValueError(f"method {name!r}: after @ comes an epoch, counted from 1, such as dessilbi@5")
        kind, dash, allocation = rest.rpartition("-")
        if not dash or allocation not in ALLOCATIONS:
            kind, allocation = rest, ""
        if kind not in KINDS:
            near = get_close_matches(kind, KINDS, n=1)
            raise ValueError(f"method {name!r}: " + (f"did you mean {near[0]!r}?" if near else f"choose one of "
                             f"{', '.join(KINDS)}"))  # fmt: skip
        known = KINDS[kind]
        if allocation and not known.allocates:
            raise ValueError(f"method {name!r}: {kind} decides by itself what each layer gets: leave out -{allocation}")
        if epoch and not known.early:
            raise ValueError(f"method {name!r}: {kind} has no epoch to choose: leave out @{epoch}")
        return cls(kind, allocation or None, int(epoch) if epoch else None)

    def find(self, bench: Bench, keep: float, repeat: int = 0) -> Found:
        """What the method keeps of the bench's network."""
        kind = KINDS[self.kind]
        if kind.untrained and bench.rewind is None:
            raise ValueError(f"{self.kind} selects before anything is trained: there is nothing to fine-tune; give an "
                             "epoch to rewind to")  # fmt: skip
        return kind.find(bench, keep, self, repeat)

    @property
    def by_chance(self) -> bool:
        """Whether it takes several to tell what the method is worth."""
        return KINDS[self.kind].chance


# -- ours --------------------------------------------------------------------------------------------------------


def _dessilbi(bench: Bench, keep: float, method: Method, repeat: int) -> Found:
    run = bench.search(method.at) if method.at else bench.settled(keep, method.allocation)
    moment = tickets.moment_of(run, method.at)
    epoch = int(moment.epoch)
    return Found(selected(moment.path, keep, method.allocation), run, epoch, _steps(run, epoch))


def _transferred(bench: Bench, keep: float, method: Method, repeat: int) -> Found:
    if bench.source is None:
        raise ValueError("transferred tickets come from another data set: name the source")
    return _dessilbi(bench.source, keep, method, repeat)


# -- by magnitude ------------------------------------------------------------------------------------------------


def _dense(bench: Bench, keep: float, method: Method, repeat: int) -> Found:
    run = bench.dense()
    return Found(Selection({}, "weight"), run, _epochs(run), _steps(run))


def _magnitude(bench: Bench, keep: float, method: Method, repeat: int) -> Found:
    run = bench.dense(method.at)
    epoch = method.at or _epochs(run)
    model = bench.network(_weights(run, epoch))
    sel = magnitude(model, keep, method.allocation or "global", **bench.sparse)
    return Found(sel, run, epoch, _steps(run, epoch))


def _iterative(bench: Bench, keep: float, method: Method, repeat: int) -> Found:
    """Rounds that end early are trainings on the same schedule, left at that epoch."""
    allocation = method.allocation or "global"
    run = dense = bench.dense(method.at)
    steps = _steps(run, method.at)

    def train(left: Selection | None) -> nn.Module:
        nonlocal run, steps
        if left is not None:
            found = Found(left, dense if bench.rewind is not None else run, method.at or _epochs(run), steps)
            # By what is kept, not by the number of the round: rounds towards other fractions are the same.
            name = f"iterative-{allocation}{f'@{method.at}' if method.at else ''}/{left.source['keep']:.5g}"
            run = bench.train(name, bench.ticket(found, method="iterative"), method.at)
            steps += _steps(run)
        return bench.network(_weights(run, method.at))

    *_, left = iterative(train, keep, allocation=allocation, **bench.sparse)
    return Found(left, dense if bench.rewind is not None else run, method.at or _epochs(run), steps)


# -- before training ---------------------------------------------------------------------------------------------


def _snip(bench: Bench, keep: float, method: Method, repeat: int) -> Found:
    sel = snip(bench.network(), *bench.images, keep, method.allocation or "global", **bench.sparse)
    batches = -(-sel.source["images"] // bench.training_config.batch)
    return Found(sel, bench.dense(0), 0, batches)


def _random(bench: Bench, keep: float, method: Method, repeat: int) -> Found:
    sel = random_global(bench.network(), keep, _seed(bench, repeat), **bench.sparse)
    return Found(sel, bench.dense(0), 0, 0)


def _random_like(bench: Bench, keep: float, method: Method, repeat: int) -> Found:
    found = _dessilbi(bench, keep, method, repeat)
    return found._replace(selection=random_like(found.selection, _seed(bench, repeat)))


# -- while training ----------------------------------------------------------------------------------------------


def _gradual(bench: Bench, keep: float, method: Method, repeat: int) -> Found:
    options = {"keep": keep, "allocation": method.allocation or "global"}
    return _accompanied(bench, keep, f"gradual-{options['allocation']}-{keep:g}", method="gradual", options=options)


def _soft_filters(bench: Bench, keep: float, method: Method, repeat: int) -> Found:
    options = {"keep": keep}
    return _accompanied(bench, keep, f"soft-filters-{keep:g}", "uniform", method="soft-filters", options=options)


def _l1(bench: Bench, keep: float, method: Method, repeat: int) -> Found:
    return _accompanied(bench, keep, "l1", method.allocation or "global", method="l1", options={"lam": _L1})


def _slimming(bench: Bench, keep: float, method: Method, repeat: int) -> Found:
    run = bench.run("slimming", bench.training_config.replace(method="slimming"))
    sel = slim(bench.network(_weights(run)), keep, exclude=bench.sparse["exclude"])
    return Found(sel, run, _epochs(run), _steps(run))


def _linbreg(bench: Bench, keep: float, method: Method, repeat: int) -> Found:
    return _bregman(bench, keep, method, bench.training_config.replace(optimizer="linbreg", lam=_BREGMAN))


def _adabreg(bench: Bench, keep: float, method: Method, repeat: int) -> Found:
    return _bregman(bench, keep, method, bench.training_config.replace(optimizer="adabreg", lam=_BREGMAN, lr=1e-3))


def _bregman(bench: Bench, keep: float, method: Method, config: Config) -> Found:
    """Its weights are zero where the dense network's are small: a ticket takes those of the dense network."""
    run = bench.run(method.kind, config)
    sel = magnitude(bench.network(_weights(run)), keep, method.allocation or "global", **bench.sparse)
    start = run if bench.rewind is None else bench.dense(bench.rewind)
    return Found(sel, start, _epochs(run), _steps(run) + (bench.rewind or 0) * bench.steps_per_epoch)


def _accompanied(
    bench: Bench,
    keep: float,
    name: str,
    allocation: str = "global",
    *,
    method: str,
    options: dict[str, Any] | None = None,
) -> Found:
    """The largest weights of a dense training with a companion: what that has pruned is zero."""
    run = bench.run(name, bench.training_config.replace(method=method, method_options=options or {}))
    sel = magnitude(bench.network(_weights(run)), keep, allocation, **bench.sparse)
    return Found(sel, run, _epochs(run), _steps(run))


class Kind(NamedTuple):
    find: Callable[[Bench, float, Method, int], Found]
    words: str
    allocates: bool = False
    early: bool = False
    untrained: bool = False
    chance: bool = False


KINDS: dict[str, Kind] = {
    "dense": Kind(_dense, "nothing is pruned"),
    "dessilbi": Kind(_dessilbi, "DessiLBI at an epoch, or when its selection has settled", True, True),
    "magnitude": Kind(_magnitude, "one-shot magnitude tickets", allocates=True, early=True),
    "iterative": Kind(_iterative, "iterative magnitude tickets, 20 % a round", allocates=True, early=True),
    "snip": Kind(_snip, "SNIP: sensitivity at the start", allocates=True, untrained=True),
    "random": Kind(_random, "random tickets", untrained=True, chance=True),
    "random-like": Kind(_random_like, "as much of each layer as DessiLBI, at random", True, True, chance=True),
    "gradual": Kind(_gradual, "gradual magnitude pruning on the cubic schedule", allocates=True),
    "l1": Kind(_l1, "the largest weights of l1-penalised SGD", allocates=True),
    "soft-filters": Kind(_soft_filters, "soft filter pruning"),
    "slimming": Kind(_slimming, "network slimming: the largest scales of batch normalisation"),
    "linbreg": Kind(_linbreg, "the largest weights of LinBreg", allocates=True),
    "adabreg": Kind(_adabreg, "the largest weights of AdaBreg", allocates=True),
    "transferred": Kind(_transferred, "DessiLBI's ticket of another data set", True, True),
}


def _seed(bench: Bench, repeat: int) -> int:
    return 1_000 * bench.seed + repeat


def _epochs(run: Run) -> int:
    return len(run.metrics())


def _steps(run: Run, epoch: int | None = None) -> int:
    """The training steps of a run up to an epoch."""
    epoch = _epochs(run) if epoch is None else epoch
    return int(run.metrics()[epoch - 1]["steps"]) if epoch else 0


def _weights(run: Run, epoch: int | None = None) -> dict[str, Tensor]:
    """The weights of a run at the end of an epoch, or of its last."""
    state = run.latest() if epoch in (None, _epochs(run)) else run.at_epoch(epoch or 0)
    assert state is not None
    weights: dict[str, Tensor] = state["model"]
    return weights
