"""`dessilbi train`: a run, from a preset, a file and options."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click

from dessilbi.training.config import Config

from .app import INTERRUPTED, Interrupted, importable_here, typed
from .options import Sectioned, config_options, configuration, given
from .progress import training_progress


@click.command(cls=Sectioned)
@click.option("--preset", metavar="NAME", help="Start from one of `dessilbi presets`.")
@click.option(
    "--config",
    "file",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="TOML file; what it sets goes over the preset.",
)
@click.option(
    "--run",
    "folder",
    metavar="FOLDER",
    type=click.Path(file_okay=False, path_type=Path),
    help="Run folder: configuration, metrics, path, checkpoints.  [runs/PRESET or runs/MODEL-DATA]",
)
@click.option("--resume", is_flag=True, help="Go on with the run in FOLDER, with its configuration.")
@click.option("--overwrite", is_flag=True, help="Start anew in a FOLDER that exists; what is there goes.")
@click.option("--dry-run", is_flag=True, help="Print the configuration as TOML and stop.")
@config_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    preset: str | None,
    file: Path | None,
    folder: Path | None,
    resume: bool,
    overwrite: bool,
    dry_run: bool,
    **_fields: Any,
) -> None:
    """Train a network and find its structure on the way.

    Defaults, then --preset, then --config, then the options below: what comes later wins, and only what is given
    counts.

    \b
    Examples:
      dessilbi train --preset quick/lenet-mnist --keep 0.06
      dessilbi train --preset paper/vgg16-weights --nu 20 --run runs/nu20
      dessilbi train --preset paper/vgg16-weights --dry-run > mine.toml
      dessilbi train --config mine.toml
      dessilbi train --run runs/nu20 --resume
      dessilbi train --model mymodule:build --data cifar10
      torchrun --nproc-per-node 2 -m dessilbi.cli train --preset paper/vgg16-weights
    """
    if resume and overwrite:
        raise click.UsageError("--resume goes on and --overwrite starts anew: give one of them", ctx)
    config = _config(ctx, preset, file, folder if resume else None)
    if dry_run:
        click.echo(config.to_toml(), nl=False)
        return
    folder = folder or Path("runs", _name(preset, config))
    train_shown(config, folder, resume, overwrite, typed(ctx))


def _config(ctx: click.Context, preset: str | None, file: Path | None, resumed: Path | None) -> Config:
    base = None
    if resumed and not preset:
        from dessilbi.training.run import Run

        base = Run.open(resumed).config
    try:
        return configuration(base, preset, file, given(ctx))
    except ValueError as error:
        raise click.UsageError(str(error), ctx) from None


def _name(preset: str | None, config: Config) -> str:
    return (preset or f"{config.model}-{config.data}").replace("/", "-").replace(":", "-")


def train_shown(config: Config, folder: Path, resume: bool, overwrite: bool, command: str) -> None:
    """Train with a display, and say how to go on or what to look at."""
    if ":" in config.model:
        importable_here()
    with resumable(folder, f"dessilbi train --run {shlex.quote(str(folder))} --resume"):
        from dessilbi.training.loop import train

        with training_progress() or nullcontext() as progress:
            train(config, folder, resume=resume, overwrite=overwrite, progress=progress, command=command)
    if progress:
        progress.write(f"done: dessilbi show {shlex.quote(str(folder))}")


@contextmanager
def resumable(folder: Path, again: str) -> Iterator[None]:
    """Ctrl-C and SIGTERM inside say how to go on with what is in the folder."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as stop:
        status = stop.code if isinstance(stop, SystemExit) and isinstance(stop.code, int) else INTERRUPTED
        if not folder.is_dir():
            raise Interrupted("interrupted before anything was saved", status) from None
        raise Interrupted(f"interrupted: go on with `{again}`", status) from None
