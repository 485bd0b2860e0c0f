"""Finding a data set's files in the places where users keep them."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from .catalog import Entry


def locate(entry: Entry, root: Path, wanted: Sequence[Iterable[str]], inner: Iterable[str]) -> list[Path]:
    """The wanted files, all from the first folder that holds them all; an empty list if there is none.

    Args:
        wanted: for each file, the names it may have, the preferred one first.
        inner: sub-folders that archives and other libraries create.

    The folders looked at: ``root/NAME``, ``root``, and the ``inner`` folders of both.
    """
    for base in (root / entry.name, root):
        for folder in (base, *(base / name for name in inner)):
            found = [next((folder / name for name in names if (folder / name).is_file()), None) for names in wanted]
            complete = [path for path in found if path]
            if len(complete) == len(wanted):
                return complete
    return []


def missing(entry: Entry, root: Path, files: Iterable[str]) -> FileNotFoundError:
    """The error for a split whose ``files`` are not there in any form that can be read."""
    folder = root / entry.name
    absent = [file for file in files if not (folder / file).is_file()]
    return FileNotFoundError(
        f"{folder}: {', '.join(absent)} not found: run `dessilbi data get {entry.name} --root {root}`, "
        "or give the folder that holds the files as root"
    )
