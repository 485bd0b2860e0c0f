"""`dessilbi report`: runs as a page, or as figures for a paper."""

from __future__ import annotations

import shlex
from pathlib import Path

import click


@click.command()
@click.argument("targets", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    "out",
    metavar="PLACE",
    type=click.Path(path_type=Path),
    help="The HTML file; with --static the folder.  [RUN/report.html, RUN/figures; without RUN/ for several]",
)
@click.option("--static", is_flag=True, help="Instead of the page, its figures as SVG and PDF. Needs dessilbi[plot].")
def command(targets: tuple[Path, ...], out: Path | None, static: bool) -> None:
    """See runs: one self-contained HTML page that opens from disk, without a network.

    RUN is a run folder, a file that Path.save wrote, or a folder of `dessilbi compare`. Several are shown on one page,
    and runs are compared: what differs in their configurations, and their curves side by side.

    \b
    Examples:
      dessilbi report runs/vgg16
      dessilbi report runs/vgg16 runs/vgg16-scaled -o both.html
      dessilbi report runs/vgg16 --static -o figures
    """
    from dessilbi.report import build_figures, build_page

    place = out or _beside(targets, "figures" if static else "report.html")
    if not place.resolve().parent.is_dir():
        raise FileNotFoundError(f"{place}: there is no folder {place.parent}: make it first")
    if static:
        for file in build_figures(targets, place):
            click.echo(file)
        return
    file = build_page(targets, place)
    click.echo(f"{file}: {file.stat().st_size / 1e6:.2f} MB; open it in a browser: {file.resolve().as_uri()}")
    if len(targets) == 1 and (targets[0] / "config.toml").is_file():
        click.echo(f"while it trains: dessilbi watch {shlex.quote(str(targets[0]))}")


def _beside(targets: tuple[Path, ...], name: str) -> Path:
    if len(targets) > 1:
        return Path(name)
    (target,) = targets
    return target / name if target.is_dir() else target.with_name(f"{target.stem}-{name}")
