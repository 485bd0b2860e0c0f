"""The group of commands, and what becomes of an error: one line that says what to do, and an exit code."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

import click

from dessilbi import __version__

FAILED, MISUSED, INTERRUPTED = 1, 2, 130

_EXTRA = ("rich", "pooch", "PIL", "sklearn", "scipy", "tomlkit")
_COMMANDS = (
    "data",
    "models",
    "presets",
    "train",
    "grow",
    "show",
    "prune",
    "ticket",
    "compare",
    "export",
    "latency",
    "report",
    "watch",
    "filters",
    "reproduce",
    "results",
)


@dataclass
class State:
    """What the commands share: the arguments as typed, and whether a traceback is wanted."""

    arguments: list[str]
    debug: bool = False


class Interrupted(Exception):
    """Ctrl-C or SIGTERM, with what the user can do next."""

    def __init__(self, text: str, status: int = INTERRUPTED) -> None:
        super().__init__(text)
        self.status = status


class Suggesting(click.Group):
    """A group that offers the nearest command for one that it does not have."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args[0] not in known and not args[0].startswith("-"):
            near = get_close_matches(args[0].lower(), known, n=1)
            advice = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(known)}"
            raise click.UsageError(f"there is no command {args[0]!r}: {advice}", ctx)
        return super().resolve_command(ctx, args)


class _Commands(Suggesting):
    """Imports a command when it is asked for: one that cannot be imported does not break the others."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command = import_module(f"dessilbi.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        _accept_debug(command)
        return command


def _accept_debug(command: click.Command) -> None:
    """`--debug` also at the end of the line, which is where it is added after an error."""
    if not any(option.name == "debug" for option in command.params):
        command.params.append(_debug_option(hidden=True))
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            _accept_debug(inner)


def _debug_option(hidden: bool = False) -> click.Option:
    return click.Option(
        ["--debug"],
        is_flag=True,
        expose_value=False,
        is_eager=True,
        hidden=hidden,
        callback=_set_debug,
        help="Show the traceback of an error.",
    )


def _set_debug(ctx: click.Context, option: click.Parameter, value: bool) -> None:
    if value:
        ctx.find_object(State).debug = True  # type: ignore[union-attr]


@click.command(
    cls=_Commands,
    invoke_without_command=True,
    params=[_debug_option()],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, message="dessilbi %(version)s")
@click.pass_context
def _dessilbi(ctx: click.Context) -> None:
    """Find the structure of a neural network while it trains.

    \b
    First steps:
      dessilbi train --preset quick/lenet-digits --keep 0.3   seconds, and no files needed
      dessilbi show runs/quick-lenet-digits                   dense and sparse accuracy, epoch by epoch
      dessilbi prune runs/quick-lenet-digits --level filter --keep 0.5 --max-prune 0.6
                                                              a network that is really smaller
      dessilbi presets                                        more settings, those of the paper among them
      dessilbi data get cifar10                               their data, checksums verified
    Stop a run with Ctrl-C and go on with --resume: the numbers are the same.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def run(arguments: list[str]) -> int:
    """The exit status of `dessilbi ARGUMENTS`; nothing is raised."""
    state = State(arguments)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # a terminal without λ gets a question mark
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        status = _dessilbi.main(arguments, prog_name="dessilbi", standalone_mode=False, obj=state)
    except SystemExit as error:  # the reader of a pipe went away
        return error.code if isinstance(error.code, int) else FAILED
    except BaseException as error:
        return _report(error, state)
    return status if isinstance(status, int) else 0


def _report(error: BaseException, state: State) -> int:
    if state.debug:
        traceback.print_exception(error)
    command = "dessilbi"
    match error:
        case Interrupted():
            status, text = error.status, str(error)
        case click.Abort() | KeyboardInterrupt():
            status, text = INTERRUPTED, "interrupted"
        case click.UsageError():
            command = error.ctx.command_path if error.ctx else command
            status, text = MISUSED, f"{_line(error.format_message())} (see {command} --help)"
        case click.ClickException():
            status, text = FAILED, error.format_message()
        case _:
            status, text = FAILED, explain(error)
    rank = os.environ.get("RANK", "0")
    where = f"[rank {rank}] " if rank != "0" else ""
    click.echo(f"{where}{command}: {_line(text)}", err=True)
    return status


def explain(error: BaseException) -> str:
    """What went wrong and what to do, in one line."""
    if isinstance(error, OSError) and error.errno is not None:
        place = f"{os.fspath(error.filename)}: " if isinstance(error.filename, str | os.PathLike) else ""
        return f"{place}{error.strerror}{_remedy(error)}"
    if isinstance(error, FileExistsError) and "--" not in str(error):
        return f"{error} (--resume, --overwrite, or another --run)"
    if isinstance(error, ModuleNotFoundError) and error.name in _EXTRA and str(error).startswith("No module named"):
        return f"{error}: pip install 'dessilbi[train]'"
    expected = isinstance(error, ValueError | OSError | ImportError) or type(error).__module__.startswith("dessilbi.")
    if expected and str(error):
        return str(error)
    if "out of memory" in str(error):
        return f"{_line(str(error)).partition('. ')[0]}: use a smaller --batch or --eval-batch, or --precision bf16"
    return f"{type(error).__name__}: {_line(str(error))} (add --debug to see where)"


def _remedy(error: OSError) -> str:
    match error:
        case PermissionError():
            return ": choose a folder that you can write"
        case FileNotFoundError():
            return ": check the path"
        case _ if error.strerror and "space" in error.strerror and ":" not in error.strerror:
            return ": free space or choose another folder"
        case _:
            return ""


def _line(text: str) -> str:
    return " ".join(text.split())


def typed(ctx: click.Context) -> str:
    """The command as it was typed, for the record of a run."""
    return shlex.join(["dessilbi", *ctx.ensure_object(State).arguments])


@contextlib.contextmanager
def told(ctx: click.Context) -> Iterator[None]:
    """Warnings as lines, each once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for text in dict.fromkeys(str(w.message) for w in caught if w.category is UserWarning):
        click.echo(f"{ctx.command_path}: {text}", err=True)


def importable_here() -> None:
    """Let `--model mymodule:build` find the modules of the current folder, as `python mymodule.py` would."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows as aligned text; columns of numbers to the right."""
    kinds = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in kinds]
    right = [all(cell.isdigit() for cell in column[1:]) for column in kinds]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in rows
    )
