"""Recipes: what the paper reports in some rows of its tables, and the runs that say what comes of it here.

    recipe = Recipe.load("weights-vgg16")           # recipes/weights-vgg16.toml; or a file of your own
    recipe.steps["ft120"].paper                     # {'accuracy': 94.18, 'weights': 0.06}

A recipe is a TOML file:

    title = "VGG16 on CIFAR-10: 5 % of the weights"
    section = "Weight pruning"      # of results/README.md, see SECTIONS
    seeds = 3                       # how many, if nobody says otherwise
    hours = 0.46                    # of one seed on one H200 …
    hours_from = "estimated …"      # … and where that is from
    note = "…"                      # printed below the table
    settings = {precision = "bf16"} # changes to the presets of all steps

    [[peers]]                       # what the paper reports of others
    name = "Iterative-Pruning-A"
    accuracy = 91.88
    weights = 0.10

    [steps.dense]
    train = "paper/vgg16-weights"   # a preset, as `dessilbi train` takes it
    settings = {nu = 2000.0}        # changes to it
    paper = {accuracy = 93.45}

    [steps.ft120]
    prune = "dense"                 # a step before, as `dessilbi prune` does
    level = "weight"                # and its other options: at, keep, params, macs, max_prune, min_keep, finetune, …
    at = 120
    finetune = 400
    paper = {accuracy = 94.18, weights = 0.06}
    goal = {accuracy = 94.2, weights = 0.05}

The other kinds of step are ``grow = PRESET`` (`dessilbi grow`; `paper` may be a list, one entry a growth) and
``compare = PRESET`` with the fields of :class:`~dessilbi.applications.comparison.Grid` but for `search` and `seeds`
(`dessilbi compare`). Accuracies are in %. Sizes (`weights` that are not zero, `parameters`, `macs`) are parts of the
dense network up to 1, counts above it; two numbers are a range. `dropped` is a number of layers.
"""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dessilbi.applications.comparison import Grid
from dessilbi.training import presets
from dessilbi.training.config import Config

SECTIONS = ("Weight pruning", "Winning tickets", "Filter pruning", "Layer pruning", "Growing", "Training", "Transfer",
            "ImageNet", "Tuning")  # fmt: skip
KINDS = ("train", "prune", "grow", "compare")
# What `--fast` divides epochs by.
FASTER = 4
SIZES = ("weights", "parameters", "macs")

_OUTCOME = ("accuracy", *SIZES, "dropped")
_PRUNING = ("level", "at", "keep", "params", "macs", "max_prune", "min_keep", "finetune", "retrain")
_GRID = tuple(f.name for f in fields(Grid) if f.name not in ("search", "seeds"))
_COMMON = ("settings", "paper", "goal", "words")
# What does not enter the numbers, or is chosen where the recipe is carried out.
_PLACE = ("device", "data_root", "workers", "seed", "compile", "fused", "channels_last", "eval_batch", "tensorboard",
          "checkpoint_every", "keep_checkpoints", "keep_epochs", "watch_step_size")  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One run, or one grid of runs, of a recipe.

    Args:
        name: what results and `dessilbi reproduce --row` call it.
        kind: one of KINDS.
        of: the preset, or the step that is pruned.
        options: those of pruning, or of the grid.
        changes: of the preset's fields.
        paper: what the paper reports, by growth where it is a list.
        goal: what this project wants to reach beyond that.
        words: what the table calls it.
    """

    name: str
    kind: str
    of: str
    options: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    paper: Mapping[str, Any] | list[Mapping[str, Any]] = field(default_factory=dict)
    goal: Mapping[str, Any] = field(default_factory=dict)
    words: str = ""

    def config(self, fast: bool = False) -> Config:
        """The configuration of what it trains, or searches with."""
        config = presets.get(self.of).replace(**self.changes)
        # The search goes on at one step size; only what follows it has a schedule.
        return faster(config) if fast and self.kind != "compare" else config

    def pruning(self, fast: bool = False) -> dict[str, Any]:
        """The arguments of :func:`~dessilbi.applications.sparsify.prune`."""
        options = dict(self.options)
        for name in ("at", "finetune", "retrain"):
            if fast and name in options:
                options[name] = _quarter(options[name])
        return options

    def grid(self, seeds: tuple[int, ...], fast: bool = False) -> Grid:
        """The grid of a comparison."""
        options: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in self.options.items()}
        grid = Grid(self.config(), seeds=seeds, **options)
        return replace(grid, epochs=_quarter(grid.epochs)) if fast else grid


@dataclass(frozen=True)
class Recipe:
    """A recipe, read and checked."""

    name: str
    title: str
    section: str
    steps: Mapping[str, Step]
    seeds: int = 3
    hours: float | None = None
    hours_from: str = ""
    note: str = ""
    peers: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def load(cls, name: str | os.PathLike[str]) -> Recipe:
        """One of `names`, or a file of your own."""
        file = Path(name)
        if file.suffix != ".toml":
            known = names()
            if str(name) not in known:
                near = get_close_matches(str(name), known, n=1)
                advice = f"did you mean {near[0]!r}?" if near else "`dessilbi reproduce` lists them"
                raise ValueError(f"there is no recipe {str(name)!r}: {advice}")
            file = folder() / f"{name}.toml"
        try:
            return cls.of(file.stem, tomllib.loads(file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise FileNotFoundError(f"{file}: no such recipe") from None
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file}: {error}") from None

    @classmethod
    def of(cls, name: str, values: Mapping[str, Any]) -> Recipe:
        """What a file of that name says."""
        _check_names("a recipe", values, [f.name for f in fields(cls) if f.name != "name"] + ["settings"])
        for wanted in ("title", "section", "steps"):
            if not values.get(wanted):
                raise ValueError(f"{wanted} is missing")
        if values["section"] not in SECTIONS:
            raise ValueError(f"section={values['section']!r}: must be one of {', '.join(SECTIONS)}")
        if values.get("hours") is not None and not values.get("hours_from"):
            raise ValueError(f"hours={values['hours']!r}: say in hours_from whether they were measured or estimated")
        shared = values.get("settings", {})
        steps = {key: _step(key, step, shared) for key, step in values["steps"].items()}
        for peer in values.get("peers", ()):
            _check_names("a peer", peer, ("name", *_OUTCOME))
        for step in steps.values():
            before = steps.get(step.of)
            if step.kind == "prune" and (before is None or before.kind not in ("train", "grow")):
                raise ValueError(f"steps.{step.name}: prune={step.of!r} is no step that trains")
        rest = {key: value for key, value in values.items() if key not in ("settings", "steps", "peers")}
        return cls(name=name, steps=steps, peers=tuple(values.get("peers", ())), **rest)

    def settings(self, step: Step, fast: bool = False) -> dict[str, Any]:
        """What decides the numbers of a step, but for the seed, as plain values: rows that differ in it are not of one
        kind."""
        if step.kind == "prune":
            found: dict[str, Any] = {"prune": step.pruning(fast), "of": self.settings(self.steps[step.of], fast)}
        elif step.kind == "compare":
            grid = step.grid((0,), fast)
            shared = {name: getattr(grid, name) for name in ("epochs", "rewind", "repeats", "source")}
            found = {"compare": _differences(grid.search), **shared}
        else:
            found = {step.kind: _differences(step.config(fast))}
        return {**found, "fast": True} if fast else found

    def kept_epochs(self, step: Step, fast: bool = False) -> tuple[int, ...]:
        """Where the steps that prune this one start."""
        mine = (s for s in self.steps.values() if s.kind == "prune" and s.of == step.name)
        return tuple(sorted({at for s in mine if (at := s.pruning(fast).get("at"))}))


def names() -> list[str]:
    """The recipes of this library, in the order of the tables."""
    found = {file.stem: tomllib.loads(file.read_text(encoding="utf-8")) for file in folder().glob("*.toml")}
    return sorted(found, key=lambda name: (SECTIONS.index(found[name]["section"]), name))


def folder() -> Path:
    """Where they lie: in an installed package inside of it, in a checkout at its top."""
    package = Path(__file__).parents[1]
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parents[1] / "recipes"


def digest(settings: Mapping[str, Any]) -> str:
    """A short name for settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]


def faster(config: Config) -> Config:
    """The same in a quarter of the epochs: drops of the step size, warm-up and growths come four times as early.

    A constant λ is divided alike: path time is the sum of the step sizes, and V grows with it.
    """
    growth = dict(config.grow_options)
    for name in ("every", "then"):
        if name in growth:
            growth[name] = _quarter(growth[name])
    epochs = _quarter(config.epochs)
    part = growth["every"] / config.grow_options["every"] if "every" in growth else epochs / config.epochs
    return config.replace(
        epochs=epochs,
        lr_every=_quarter(config.lr_every),
        lr_at=tuple(dict.fromkeys(map(_quarter, config.lr_at))),
        warmup=config.warmup / FASTER,
        keep_epochs=tuple(dict.fromkeys(_quarter(at) for at in config.keep_epochs)),
        lam=config.lam * part if config.ours and config.keep is None else config.lam,
        grow_options=growth,
    )


def _quarter(epochs: int) -> int:
    return max(1, round(epochs / FASTER))


def _differences(config: Config) -> dict[str, Any]:
    """What a configuration has that is not the default and enters the numbers."""
    plain, default = config.to_dict(), Config().to_dict()
    return {name: value for name, value in plain.items() if name not in _PLACE and value != default[name]}


def _step(name: str, values: Mapping[str, Any], shared: Mapping[str, Any]) -> Step:
    kinds = [kind for kind in KINDS if kind in values]
    if len(kinds) != 1:
        raise ValueError(f"steps.{name}: needs one of {', '.join(KINDS)}, and has {' and '.join(kinds) or 'none'}")
    kind = kinds[0]
    own = {"prune": _PRUNING, "compare": _GRID}.get(kind, ())
    _check_names(f"steps.{name}", values, (kind, *_COMMON, *own))
    paper = values.get("paper", {})
    for outcome in (*(paper if isinstance(paper, list) else [paper]), values.get("goal", {})):
        _check_names(f"steps.{name}: an outcome", outcome, _OUTCOME)
    if kind == "prune" and values.get("settings"):
        raise ValueError(f"steps.{name}: settings are those of the step that is pruned")
    step = Step(
        name,
        kind,
        values[kind],
        options={key: values[key] for key in own if key in values},
        changes={} if kind == "prune" else {**shared, **values.get("settings", {})},
        paper=paper,
        goal=values.get("goal", {}),
        words=values.get("words", ""),
    )
    if kind == "prune":
        if ("finetune" in step.options) == ("retrain" in step.options) or "level" not in step.options:
            raise ValueError(f"steps.{name}: pruning needs a level, and finetune or retrain")
    elif kind == "compare":
        step.grid((0,))
    elif bool(step.config().grow_options) != (kind == "grow"):
        raise ValueError(f"steps.{name}: {step.of!r} is for the other of `train` and `grow`")
    return step


def _check_names(what: str, values: Mapping[str, Any], known: Any) -> None:
    for name in values:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            advice = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise ValueError(f"{what} has {name!r}: {advice}")
