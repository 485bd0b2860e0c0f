"""Carrying out a recipe: its steps for some seeds, each once, gone on with where it was cut off.

    work = Reproduction(Recipe.load("weights-vgg16"), runs="runs", results="results", fast=True)
    wrong = work.go(work.todo(range(3)), jobs=4)

A step is done by the application that it names, in a run folder of its own (`runs`/RECIPE/STEP-SETTINGS/seed-N), and
its outcome goes into `results` at once. Steps whose outcome is there are passed over, so the folder of a run is only
needed for steps that are still to do. The name of a folder has a digest of the settings in it: a recipe that was
changed goes on in other folders.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path as FilePath
from typing import Any, NamedTuple

from dessilbi.applications.comparison import Cell, Comparison
from dessilbi.applications.grow import grow, read_growth
from dessilbi.applications.methods import Method
from dessilbi.applications.processes import side_by_side
from dessilbi.applications.recipe import Recipe, Step, digest
from dessilbi.applications.results import Results, Row
from dessilbi.applications.sparsify import finish, prune, read_table
from dessilbi.selection import Selection
from dessilbi.training.config import Config
from dessilbi.training.distribution import World, find_device
from dessilbi.training.environment import facts
from dessilbi.training.loop import train
from dessilbi.training.run import Run
from dessilbi.training.session import TrainingDiverged

# What an environment says about a run that its row repeats.
_FACTS = ("command", "device", "processes", "threads", "dessilbi", "python", "torch", "numpy", "cuda", "platform",
          "cores")  # fmt: skip
# What goes wrong in one step and lets the others be.
_WRONG = (ValueError, OSError, ImportError)


def _unsaid(text: str) -> None:
    """What notes come to where nobody listens; processes can be sent it, unlike a lambda."""


class Task(NamedTuple):
    """A step for a seed; of a comparison, one of its cells."""

    step: str
    seed: int
    method: str | None = None
    keep: float | None = None

    def __str__(self) -> str:
        cell = f" {self.method} at {self.keep:g}" if self.method else ""
        return f"{self.step}{cell}, seed {self.seed}"


class Reproduction:
    """A recipe and where it is carried out.

    Args:
        recipe: what to do.
        runs: the folder of run folders.
        results: the folder of the outcomes.
        fast: with a quarter of the epochs.
        place: fields of the configuration that depend on the machine: `data_root`, `device`.
        command: recorded with every run.
        note: is told what is begun and what came of it.
        progress: makes what :func:`~dessilbi.training.train` calls `progress`, for steps that are done in this process.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        runs: str | os.PathLike[str] = "runs",
        results: str | os.PathLike[str] = "results",
        fast: bool = False,
        place: Mapping[str, Any] | None = None,
        command: str = "",
        note: Callable[[str], object] = _unsaid,
        progress: object | None = None,
    ) -> None:
        self.recipe = recipe
        self.runs = FilePath(runs) / recipe.name
        self.results = Results(results, recipe.name)
        self.fast = fast
        self.place = dict(place or {})
        self.command, self.note, self.progress = command, note, progress
        self.jobs = 1

    # -- what there is to do -------------------------------------------------------------------------------------

    def tasks(self, seeds: Iterable[int], rows: Sequence[str] = ()) -> list[Task]:
        """All of it, or some rows: steps, or methods of a comparison. Neighbours are of different seeds."""
        found: list[Task] = []
        seeds = tuple(seeds)
        for step in self.recipe.steps.values():
            if step.kind == "compare":
                cells = step.grid(seeds, self.fast).cells()
                found += [Task(step.name, cell.seed, cell.method, cell.keep) for cell in cells]
            else:
                found += [Task(step.name, seed) for seed in seeds]
        known = dict.fromkeys(name for task in found for name in (task.step, task.method) if name)
        for name in rows:
            if name not in known:
                raise ValueError(f"row {name!r}: {self.recipe.name} has {', '.join(known)}")
        return [task for task in found if not rows or task.step in rows or task.method in rows]

    def todo(self, seeds: Iterable[int], rows: Sequence[str] = ()) -> list[Task]:
        """Those whose outcome is not there."""
        done = [(row["row"], row["seed"], row.get("method"), row.get("keep"), digest(row["settings"]))
                for row in self.results.rows()]  # fmt: skip
        return [task for task in self.tasks(seeds, rows) if (*task, digest(self._settings(task))) not in done]

    def needs(self, task: Task) -> Task | None:
        """What has to be done before."""
        step = self.recipe.steps[task.step]
        if step.kind == "prune":
            return Task(step.of, task.seed)
        # The other cells of a seed share the dense network's run.
        return Task(step.name, task.seed, "dense", 1.0) if task.method not in (None, "dense") else None

    def _settings(self, task: Task) -> dict[str, Any]:
        return self.recipe.settings(self.recipe.steps[task.step], self.fast)

    # -- doing it ------------------------------------------------------------------------------------------------

    def go(self, tasks: Sequence[Task], jobs: int = 1) -> list[str]:
        """Do these tasks, so many at a time; returns what went wrong, a line a task.

        With several `jobs` each task has a process of its own, and all of them share the device. An interrupt stops
        them at the end of their steps; nothing is lost.
        """
        if jobs < 1:
            raise ValueError(f"jobs={jobs!r}: must be at least 1")
        tasks = self._with_needed(tasks)
        self.jobs = min(jobs, max(1, len(tasks)))
        if self.jobs > 1:
            return side_by_side(self.attempt, tasks, self.needs, self.jobs)
        failed, wrong = set[Task](), list[str]()
        for task in tasks:
            line = None if self.needs(task) in failed else self.attempt(task)
            if line is not None:
                wrong.append(line)
            if line is not None or self.needs(task) in failed:
                failed.add(task)
        return wrong

    def _with_needed(self, tasks: Sequence[Task]) -> list[Task]:
        """Tasks, and first those which they need and whose outcome is there but not their run."""
        needed = dict.fromkeys(before for task in tasks if (before := self.needs(task)) is not None)
        return [*(task for task in needed if task not in tasks and not self._is_there(task)), *tasks]

    def _is_there(self, task: Task) -> bool:
        step = self.recipe.steps[task.step]
        if step.kind == "compare":
            return (
                self._folder(step) / "cells" / f"{Cell(task.method or '', task.keep or 1.0, task.seed)}.json"
            ).is_file()
        folder = self._folder(step, task.seed)
        return (folder / "config.toml").is_file() and Run.open(folder).status == "finished"

    def attempt(self, task: Task) -> str | None:
        """Do a task; what went wrong, where the others can go on."""
        try:
            self.do(task)
        except _WRONG as error:
            return f"{task}: {error}"
        return None

    def do(self, task: Task) -> None:
        """Do a task and put its outcome into the results. A run that diverges has one too."""
        step = self.recipe.steps[task.step]
        self.note(f"{self.recipe.name}: {task}{' (fast)' if self.fast else ''}")
        begun = time.perf_counter()
        try:
            rows, run = {"train": self._train, "grow": self._grow, "prune": self._prune, "compare": self._compare}[
                step.kind
            ](step, task)
        except TrainingDiverged as error:
            rows, run = [{"accuracy": None, "error": str(error)}], None
        about = {
            "row": task.step,
            "seed": task.seed,
            "fast": self.fast,
            "settings": self._settings(task),
            **({"method": task.method, "keep": task.keep} if task.method else {}),
        }
        where = self._facts(run)
        self.results.add({**about, **row, "jobs": self.jobs, **where} for row in rows)
        last = rows[-1]["accuracy"]
        outcome = "diverged" if last is None else f"{100 * last:.2f} %"
        self.note(f"{self.recipe.name}: {task}: {outcome} after {time.perf_counter() - begun:.0f} s")

    def _train(self, step: Step, task: Task) -> tuple[list[Row], Run]:
        run = self._trained(step, task.seed)
        last = run.metrics()[-1]
        row = {"accuracy": last["dense"], "epochs": last["epoch"], "seconds": _seconds(run)}
        # `keep` would be that of a comparison's cell.
        found = {"sparse": last.get("sparse"), "support": last.get("keep")}
        return [row | {name: value for name, value in found.items() if value is not None}], run

    def _grow(self, step: Step, task: Task) -> tuple[list[Row], Run]:
        run = self._trained(step, task.seed)
        rows = [
            {
                "stage": number,
                "accuracy": stage["accuracy"],
                "parameters": stage["parameters"],
                "macs": stage["macs"],
                "epochs": stage["epoch"],
                "seconds": stage["seconds"],
            }
            for number, stage in enumerate(read_growth(run)["stages"])
        ]
        return rows, run

    def _prune(self, step: Step, task: Task) -> tuple[list[Row], Run]:
        folder = self._folder(step, task.seed)
        with self._alone(folder):
            if not (folder / "config.toml").is_file():
                before = self._trained(self.recipe.steps[step.of], task.seed)
                prune(before, folder, **step.pruning(self.fast), **self.place, overwrite=folder.exists(), rounds=0,
                      command=self.command, note=self.note)  # fmt: skip
            found = Run.open(folder)
            run = Run(folder, found.config.replace(**self.place))
            finish(run, self.progress, self.command)
        rows = {row["network"]: row for row in read_table(run)["rows"]}
        dense, trained = rows["dense"], rows[read_table(run)["trained"]]
        gone = [name for name, kept in Selection.load(run.selection_file).per_layer().items() if not kept]
        row = {
            "accuracy": trained["accuracy"],
            "weights": trained["nonzero"] / dense["parameters"],
            "parameters": trained["parameters"],
            "macs": trained["macs"],
            "dense_parameters": dense["parameters"],
            "dense_macs": dense["macs"],
            "dropped": len(gone),
            "dense_accuracy": dense["accuracy"],
            "pruned_accuracy": rows["selected"]["accuracy"],
            "epochs": trained["epochs"],
            "seconds": _seconds(run),
        }
        return [row], run

    def _compare(self, step: Step, task: Task) -> tuple[list[Row], Run | None]:
        seeds = tuple(range(max(self.recipe.seeds, task.seed + 1)))
        grid = step.grid(seeds, self.fast)
        grid = replace(grid, search=grid.search.replace(**self._here(grid.search)))
        comparison = Comparison.create(self._folder(step), grid)
        begun = time.perf_counter()
        cell = Cell(task.method or "", task.keep or 1.0, task.seed)
        found = comparison.do(cell, self.note)
        values = found["accuracies"]
        run = Run.open(comparison.folder / found["run"])
        repeats = len(values) if Method.parse(cell.method).by_chance else 1
        row = {
            "accuracy": sum(values) / len(values),
            "accuracies": values,
            "weights": found["kept"],
            "at": found["at"],
            "cost": found["cost"],
            "emptied": len(found["emptied"]),
            "epochs": grid.epochs * repeats,
            "seconds": time.perf_counter() - begun,
        }
        return [row], run

    def _trained(self, step: Step, seed: int) -> Run:
        """The run of a step, done."""
        folder = self._folder(step, seed)
        config = step.config(self.fast).replace(seed=seed, keep_checkpoints=1)
        config = config.replace(keep_epochs=self.recipe.kept_epochs(step, self.fast), **self._here(config))
        work = grow if step.kind == "grow" else train
        with self._alone(folder):
            there = (folder / "config.toml").is_file()
            run = Run.open(folder) if there else None
            if run is not None and self._lacks(run, config):
                there = False
            if run is None or not there or run.status != "finished":
                work(
                    config,
                    folder,
                    resume=there,
                    overwrite=not there and folder.exists(),
                    progress=self.progress,
                    command=self.command,
                )
        return Run.open(folder)

    @staticmethod
    def _lacks(run: Run, config: Config) -> bool:
        """Whether a step that starts at an epoch came into the recipe when the run was past it."""
        done, kept = len(run.metrics()), run.kept_epochs()
        return any(epoch not in kept for epoch in config.keep_epochs if epoch <= done)

    # -- places --------------------------------------------------------------------------------------------------

    def _folder(self, step: Step, seed: int | None = None) -> FilePath:
        folder = self.runs / f"{step.name}-{digest(self.recipe.settings(step, self.fast))}"
        return folder if seed is None else folder / f"seed-{seed}"

    def _here(self, config: Config) -> dict[str, Any]:
        """What the place changes in a configuration: only a GPU captures graphs."""
        cuda = find_device(str(self.place.get("device", config.device))).type == "cuda"
        return {**self.place, **({} if cuda or config.compile != "graph" else {"compile": "none"})}

    @staticmethod
    def _alone(folder: FilePath) -> Any:
        """One process at a time works at a run; the others wait, and find it done."""
        from filelock import FileLock

        folder.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(folder.with_name(f".{folder.name}.lock"))

    def _facts(self, run: Run | None) -> dict[str, Any]:
        """Where and when a row was measured; the commits of all processes that had a part in it."""
        device = find_device(str(self.place.get("device", "auto")))
        now = facts(World(0, 1, device), self.command)
        known = run.environment if run is not None else now
        parts = [known, *known.get("resumed", ())]
        commits = dict.fromkeys(str(part.get("commit")) for part in parts)
        return {name: now[name] for name in _FACTS} | {
            "commit": " ".join(commits),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }


def _seconds(run: Run) -> float:
    return float(sum(epoch["seconds"] + epoch["evaluation_seconds"] for epoch in run.metrics()))
