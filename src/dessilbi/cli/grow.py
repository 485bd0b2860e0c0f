"""`dessilbi grow`: a network that starts with a handful of filters, and gets more where it needs them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dessilbi.training.config import Config
from dessilbi.training.growing import INITS, POLICIES, Growing

from .app import importable_here, typed
from .grid import Several
from .options import Sectioned, configuration, given, growth_options
from .progress import training_progress
from .prune import short
from .train import resumable

if TYPE_CHECKING:
    from dessilbi.training.run import Run

_F = TypeVar("_F", bound=Any)

_WHOLE = click.IntRange(min=1)


class _Thresholds(click.ParamType[Any]):
    """One τ, or one by layer: `0.8,classifier=0.5`."""

    name = "f|layer=f,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found: dict[str, float] = {}
        for word in str(value).split(","):
            layer, equals, number = word.strip().rpartition("=")
            try:
                found[layer if equals else "default"] = float(number)
            except ValueError:
                self.fail(f"{word!r} of {value!r} is neither a number nor LAYER=NUMBER", param, ctx)
        return found["default"] if list(found) == ["default"] else found


_SETTINGS = (
    click.option("--every", type=_WHOLE, metavar="J", help="Epochs between two decisions."),
    click.option("--tau", type=_Thresholds(), help="A layer grows with more than this part of it selected."),
    click.option("--by", type=click.FloatRange(0), metavar="R", help="By this part of its width,"),
    click.option("--least", type=_WHOLE, metavar="N", help="and by so many filters at least."),
    click.option("--growths", type=_WHOLE, metavar="N", help="At most so many growths."),
    click.option("--params", type=Several(int), help="Parameters at most; several: after each growth."),
    click.option("--macs", type=_WHOLE, metavar="N", help="Multiply-adds an image at most."),
    click.option("--flat", type=click.FloatRange(0), metavar="F", help="Stop growing when the loss fell by less."),
    click.option("--then", type=_WHOLE, metavar="E", help="Epochs after the last decision."),
    click.option("--policy", type=click.Choice(POLICIES), help="Who grows: layers above τ, or all alike."),
    click.option("--init", type=click.Choice(INITS), help="What new filters and their outputs start from."),
)


def _settings(function: _F) -> _F:
    for option in reversed(_SETTINGS):
        function = option(function)
    return function


@click.command(cls=Sectioned)
@click.option("--preset", metavar="NAME", help="Start from one of `dessilbi presets`, such as grow/lenet-mnist.")
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
    help="Run folder.  [runs/PRESET or runs/MODEL-DATA]",
)
@click.option(
    "--control",
    metavar="RUN",
    type=click.Path(file_okay=False, path_type=Path),
    help="The control of a run that grew: all layers alike, to the same sizes at the same epochs.",
)
@click.option("--resume", is_flag=True, help="Go on with the run in FOLDER, with its configuration.")
@click.option("--overwrite", is_flag=True, help="Start anew in a FOLDER that exists; what is there goes.")
@click.option("--show", "only_show", is_flag=True, help="Show how the network in FOLDER grew, and do nothing.")
@click.option(
    "--figure",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw widths over time and accuracy against size: .svg, .pdf or .png.",
)
@click.option("--dry-run", is_flag=True, help="Print the configuration as TOML and stop.")
@_settings
@growth_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    preset: str | None,
    file: Path | None,
    folder: Path | None,
    control: Path | None,
    resume: bool,
    overwrite: bool,
    only_show: bool,
    figure: Path | None,
    dry_run: bool,
    **_fields: Any,
) -> None:
    """Grow a network from a seed: layers most of whose filters have been selected get more of them.

    --epochs is the most that the run may take; it ends --then epochs after the last decision.

    \b
    Examples:
      dessilbi grow --preset grow/lenet-mnist
      dessilbi grow --preset grow/vgg16-cifar10-fast --params 1000000 --run runs/million
      dessilbi grow --model mymodule:build --data cifar10 --every 5 --tau 0.7 --epochs 100
      dessilbi grow --run runs/million --resume
      dessilbi grow --run runs/million --show --figure million.svg
      dessilbi grow --control runs/million --run runs/million-uniform
      dessilbi prune runs/million --level filter --macs 50%
    """
    if resume and overwrite:
        raise click.UsageError("--resume goes on and --overwrite starts anew: give one of them", ctx)
    from dessilbi.training.run import Run

    if only_show:
        if folder is None:
            raise click.UsageError("--show needs the folder of a run: give --run FOLDER", ctx)
        show_growth(Run.open(folder))
        _draw(folder, figure)
        return
    config = _config(ctx, preset, file, folder if resume else None, control)
    if dry_run:
        click.echo(config.to_toml(), nl=False)
        return
    name = f"{control.resolve().name}-uniform" if control else preset or f"{config.model}-{config.data}"
    folder = folder or Path("runs", name.replace("/", "-").replace(":", "-"))
    if ":" in config.model:
        importable_here()
    with resumable(folder, f"dessilbi grow --run {shlex.quote(str(folder))} --resume"):
        from dessilbi.applications.grow import grow

        with training_progress() or nullcontext() as progress:
            grow(config, folder, resume=resume, overwrite=overwrite, progress=progress, command=typed(ctx))
    if progress:
        show_growth(Run.open(folder))
        _draw(folder, figure)


def _config(
    ctx: click.Context, preset: str | None, file: Path | None, resumed: Path | None, control: Path | None
) -> Config:
    """As for `train`; of what is said about growing, too, only what is given counts."""
    from dessilbi.training.run import Run

    growth = {f.name: ctx.params[f.name] for f in fields(Growing) if ctx.params[f.name] is not None}
    if "params" in growth:
        growth["params"] = list(growth["params"]) if len(growth["params"]) > 1 else growth["params"][0]
    changes = given(ctx)
    if control is not None:
        if preset or file or resumed or growth:
            raise click.UsageError("--control takes the settings of its RUN: leave --preset and the like out", ctx)
        from dessilbi.applications.grow import control as uniform

        return uniform(Run.open(control)).replace(**changes)
    base = Run.open(resumed).config if resumed and not preset else None
    try:
        known = base if base is not None else configuration(None, preset, None, {})
        wanted = _options_of(known, file) | growth or {"every": Growing.every}
        config = configuration(base, preset, file, {**changes, "grow_options": wanted})
        Growing.of(wanted).check_time(config.epochs)
        return config
    except ValueError as error:
        raise click.UsageError(str(error), ctx) from None


def _options_of(config: Config, file: Path | None) -> dict[str, Any]:
    """What the preset and then the file say about growing."""
    own = dict(config.grow_options)
    return own | dict(Config.from_toml(file).grow_options) if file else own


def _draw(folder: Path, figure: Path | None) -> None:
    if figure is not None:
        from dessilbi.report.growth import draw

        click.echo(draw(folder, figure))


def show_growth(run: Run) -> None:
    """The history of a network that grew, and how wide its layers have become."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from dessilbi.report.growth import growth

    found = growth(run)
    console = Console(highlight=False)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("epoch", "accuracy", "loss", "params", "MACs", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("then grew")
    for stage in found["stages"]:
        loss = stage["loss"]
        table.add_row(
            str(stage["epoch"]),
            f"{100 * stage['accuracy']:.2f} %",
            "-" if loss is None else f"{loss:.4f}",
            short(stage["parameters"]),
            short(stage["macs"]),
            f"{stage['seconds']:.0f} s",
            _told(stage["grew"]),
        )
    layers = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    layers.add_column("layer", no_wrap=True)
    for heading in ("seed", "grown", *(("paper",) if found["paper"] else ())):
        layers.add_column(heading, justify="right", no_wrap=True)
    for layer in found["layers"]:
        paper = ["-" if layer["paper"] is None else str(layer["paper"])] if found["paper"] else []
        layers.add_row(layer["name"], str(layer["widths"][0]), str(layer["widths"][-1]), *paper)
    stopped = f"grown: {found['stopped']}" if found["stopped"] else "growing"
    console.print(f"{run.folder}: {run.config.model} on {run.config.data}, {stopped}", style="bold", markup=False,
                  soft_wrap=True)  # fmt: skip
    console.print(table)
    console.print(layers)
    for point in found["paper"]:
        text = f"paper: {100 * point['accuracy']:.2f} % with {short(point['parameters'])} parameters"
        console.print(text, markup=False, soft_wrap=True)


def _told(grew: Mapping[str, int]) -> str:
    return ", ".join(f"{layer} +{extra}" for layer, extra in grew.items()) or "-"
