"""Growing: a network starts with a handful of filters a layer, and a layer gets more where most of them are selected.

    summary = grow(presets.get("grow/lenet-mnist"), "runs/lenet")       # stopped? grow(…, resume=True)
    read_growth(Run.open("runs/lenet"))["stages"]

Every `every` epochs a layer is short of capacity if

    ratio = #supp(Γ) / #supp(W) > τ                             (counted over all layers that write its channels)

and gets max(`least`, `by` · width) new filters (:func:`dessilbi.widen`); the others stay. When no layer grew, a budget
or the number of growths is used up, the loss has become flat or the time is, the growth is over and `then` epochs
follow. The step size is constant while the network grows, and falls by `lr_drop` for the epochs after it (`schedule =
"step"`, the paper's); with `schedule = "cosine"` it falls to zero before every decision and once more in the end, so
that the accuracy of every size is that of a trained network. What of the settings is a number of epochs counts from
the last decision.

The folder is that of any run: `dessilbi show` and `dessilbi prune` take it. Its path is that since the last growth.
Beside it lies growth.json:

    version     1
    settings    those of :class:`~dessilbi.training.growing.Growing`
    streams     the layers that can grow, as lists: those in one have the same channels, and the first is their name
    stages      a list, one entry a decision and one for the end of the run:
        epoch       at whose end
        widths      by layer, all of them: of the network that was trained up to here
        parameters, macs (one image), accuracy (on the test split), loss (of training), seconds (so far)
        ratios      by stream; null where it has nothing that is penalised: such a stream does not grow
        grew        by stream, the new filters that the decision brought; empty where there were none
    rigid       streams that turned out not to be able to: sizes are written into the network's code
    full        whether a budget is used up: the last growth was cut down to fit
    stopped     why the growth is over; null while it is not
    end         the epoch at whose end the run is; null while that is open
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from dessilbi import files
from dessilbi.optim import DessiAdamW, DessiLBI
from dessilbi.surgery.widening import Widening
from dessilbi.training import randomness
from dessilbi.training.config import Config
from dessilbi.training.growing import Growing, Now
from dessilbi.training.loop import train
from dessilbi.training.run import Run
from dessilbi.training.schedule import step_size

_VERSION = 1
# How far a growth may go that has a budget to fill: so many times the width.
_MOST = 16.0


def grow(config: Config, folder: str | os.PathLike[str], **options: Any) -> dict[str, Any]:
    """Train a network that grows, as its `grow_options` say; `options` and the result are those of `train`."""
    if not config.grow_options:
        raise ValueError("grow_options is empty: say how the network grows, such as {'every': 10, 'tau': 0.8}")
    return train(config, folder, grower=Growth(config), **options)


def control(run: Run) -> Config:
    """The control of a run that grew: all layers grow alike, to the same numbers of parameters at the same epochs."""
    found = read_growth(run)
    sizes = [stage["parameters"] for stage in found["stages"]]
    reached = sorted({size for size in sizes if size > sizes[0]})
    if not reached:
        raise ValueError(f"{run.folder}: did not grow: there is nothing to compare it with")
    return run.config.replace(grow_options={**run.config.grow_options, "policy": "uniform", "params": reached})


def read_growth(run: Run) -> dict[str, Any]:
    """How the network of a run grew: growth.json, whose fields stand at the top of this module."""
    if not run.growth_file.is_file():
        raise ValueError(f"{run.folder}: is not a run of a network that grows (it has no {run.growth_file.name})")
    try:
        found: dict[str, Any] = json.loads(run.growth_file.read_text(encoding="utf-8"))
        if found["version"] > _VERSION:
            raise ValueError(f"its format {found['version']} is newer than {_VERSION}, the last this version reads")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{run.growth_file}: not a history of growth ({error})") from None
    return found


class Growth:
    """What lets a network grow, and remembers how it did: a :class:`~dessilbi.training.growing.Grower`."""

    def __init__(self, config: Config) -> None:
        self.growing = Growing.of(config.grow_options)
        self.growing.check_time(config.epochs)
        self.epochs, self.seed = config.epochs, config.seed
        whole = config.replace(grow_options={})
        cosine = config.schedule == "cosine"
        first = whole.replace(epochs=self.growing.every, schedule="cosine" if cosine else "constant")
        last = config.lr / config.lr_drop if config.schedule == "step" else config.lr
        self._phases = {
            "first": first,
            "growing": first.replace(warmup=0),
            "end": whole.replace(epochs=self.growing.then, warmup=0, lr=last),
        }
        self.since = 0  # the epoch of the last growth, or of the end of growth
        self.seconds = 0.0
        self.history: dict[str, Any] = {
            "version": _VERSION,
            "settings": self.growing.to_dict(),
            "streams": [],
            "stages": [],
            "rigid": [],
            "full": False,
            "stopped": None,
            "end": None,
        }
        self._changed = True

    # -- what the loop asks --------------------------------------------------------------------------------------

    @property
    def end(self) -> int | None:
        end: int | None = self.history["end"]
        return end

    def step_size(self, step: int, steps_per_epoch: int) -> float:
        phase = "end" if self.history["stopped"] else "growing" if self.since else "first"
        return step_size(self._phases[phase], step - self.since * steps_per_epoch, steps_per_epoch)

    def end_epoch(self, now: Now) -> nn.Module | None:
        epoch, begun = now.metrics["epoch"], time.perf_counter()
        self.seconds += now.metrics["seconds"] + now.metrics["evaluation_seconds"]
        deciding = not self.history["stopped"] and epoch - self.since == self.growing.every
        if not deciding and epoch != self.end:
            return None
        # Following a network's code may draw random numbers, in one process and not in the next.
        state = randomness.state()
        try:
            widening = Widening(now.model, now.example)
            ratios = self._note(now, widening)
            return self._decide(now, widening, ratios) if deciding else None
        finally:
            randomness.restore(state)
            self.seconds += time.perf_counter() - begun

    def write(self, run: Run) -> None:
        if self._changed:
            files.write_atomically(run.growth_file, (json.dumps(self.history, indent=1) + "\n").encode())
            self._changed = False

    def state_dict(self) -> dict[str, Any]:
        return {"since": self.since, "seconds": self.seconds, "history": self.history}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.since, self.seconds = state["since"], state["seconds"]
        self.history, self._changed = dict(state["history"]), True

    # -- what is decided -----------------------------------------------------------------------------------------

    def _note(self, now: Now, widening: Widening) -> dict[str, float | None]:
        """Write down what the network is at the end of this stage."""
        streams = [stream for stream in widening.streams if stream[0] not in self.history["rigid"]]
        ratios = {stream[0]: ratio(now, stream) for stream in streams}
        self.history["streams"] = streams
        self.history["stages"] = [
            *self.history["stages"],
            {
                "epoch": now.metrics["epoch"],
                "widths": widening.widths,
                "parameters": sum(p.numel() for p in now.model.parameters()),
                "macs": widening.macs({}),
                "accuracy": now.metrics["dense"],
                "loss": now.metrics["loss"],
                "seconds": self.seconds,
                "ratios": ratios,
                "grew": {},
            },
        ]
        self._changed = True
        return ratios

    def _decide(self, now: Now, widening: Widening, ratios: Mapping[str, float | None]) -> nn.Module | None:
        stages = self.history["stages"]
        self.since = stages[-1]["epoch"]
        reason = self._reason(stages)
        extra = self._amounts(widening, ratios, len(stages) - 1) if reason is None else {}
        if reason is None and not extra and not self.growing.in_steps:
            reason = "budget" if self._short(ratios) else "no layer is short of filters"
        if reason is not None:
            self.history |= {"stopped": reason, "end": self.since + self.growing.then}
            return None
        if not extra:  # what this decision was allowed is too little; the next one is allowed more
            return None
        init = self.growing.init
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.since) % 2**63)
        loss = {"loss": now.loss} if init == "gradmax" else {}
        try:
            wide = widening.apply(extra, now.optimizer, init=init, generator=generator, **loss)
        except ValueError:
            rigid = [name for name in extra if widening.rigid(name)]
            if not rigid:
                raise
            self._leave_alone(rigid)
            return self._decide(now, widening, {name: r for name, r in ratios.items() if name not in rigid})
        stages[-1]["grew"] = extra
        return wide

    def _leave_alone(self, rigid: list[str]) -> None:
        """Streams that cannot grow do not count from here on."""
        history = self.history
        history["rigid"] = [*history["rigid"], *rigid]
        history["streams"] = [stream for stream in history["streams"] if stream[0] not in rigid]
        history["full"] = False
        for name in rigid:
            del history["stages"][-1]["ratios"][name]

    def _reason(self, stages: list[dict[str, Any]]) -> str | None:
        """Why growth ends here, whatever the ratios are."""
        settings, decisions = self.growing, len(stages) - 1
        grown = sum(bool(stage["grew"]) for stage in stages)
        if grown >= (settings.growths or self.epochs) or (settings.in_steps and decisions >= len(settings.budgets)):
            return "growths"
        if self.history["full"]:
            return "budget"
        if self.since + settings.every + settings.then > self.epochs:
            return "epochs"
        if len(stages) > 1 and stages[-1]["loss"] > (1 - settings.flat) * stages[-2]["loss"] and settings.flat:
            return "flat loss"
        return None

    def _short(self, ratios: Mapping[str, float | None]) -> list[str]:
        """The streams that are short of filters. Where every growth has a budget to fill, those that come nearest."""
        known = {name: r for name, r in ratios.items() if r is not None}
        if self.growing.policy == "uniform":
            return list(known)
        short = [name for name, r in known.items() if r > self.growing.threshold(name)]
        if not short and self.growing.in_steps:
            most = max(known.values(), default=0.0)
            short = [name for name, r in known.items() if r == most]
        return short

    def _amounts(self, widening: Widening, ratios: Mapping[str, float | None], decision: int) -> dict[str, int]:
        """How many filters each stream gets; none if even the least is over the budget."""
        settings, short = self.growing, self._short(ratios)
        budgets = settings.budgets[decision : decision + 1] if settings.in_steps else settings.budgets

        def amounts(factor: float, least: int) -> dict[str, int]:
            found = {}
            for name in short:
                step = widening.multiple(name)
                found[name] = -(-max(least, int(factor * widening.width(name))) // step) * step
            return found

        def fits(extra: dict[str, int]) -> bool:
            return all(widening.parameters(extra) <= budget for budget in budgets) and (
                settings.macs is None or widening.macs(extra) <= settings.macs
            )

        if not short or (budgets and not fits(amounts(0.0, 1))):
            return {}
        if not settings.in_steps and fits(amounts(settings.by, settings.least)):
            return amounts(settings.by, settings.least)
        factor = _largest(lambda x: fits(amounts(x, 1)), _MOST if settings.in_steps else settings.by)
        self.history["full"] = not settings.in_steps
        return amounts(factor, 1) if fits(amounts(factor, 1)) else {}


def ratio(now: Now, stream: list[str]) -> float | None:
    """#supp(Γ)/#supp(W), counted in groups over all layers of a stream; None where none is penalised."""
    optimizer = now.optimizer
    assert isinstance(optimizer, (DessiLBI, DessiAdamW))
    names = {id(p): name for name, p in now.model.named_parameters()}
    wanted = {f"{path}.weight" for path in stream} | set(stream)
    counts = []
    for p, part in optimizer.penalised():
        if names[id(p)] in wanted:
            with torch.no_grad():
                there = part.shares(part.split(p)) != 0
            counts.append(torch.stack([optimizer.support(p).sum(), there.sum()]))
    if not counts:
        return None
    selected, there = torch.stack(counts).sum(0).tolist()
    return selected / there if there else 0.0


def _largest(fits: Callable[[float], bool], high: float) -> float:
    """The largest number up to `high` that fits, to a part in a million."""
    low = 0.0
    if fits(high):
        return high
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
