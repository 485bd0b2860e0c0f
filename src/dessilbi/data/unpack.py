"""Taking the wanted files out of whatever they came in."""

import gzip
import shutil
import tarfile
import zlib
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import IO


def unpack(source: Path, name: str, folder: Path, wanted: Collection[str]) -> None:
    """Copy the ``wanted`` files out of ``source`` into ``folder``, without their ``.gz``.

    ``source`` is a tar archive or a plain file, as its published ``name`` tells. Of an archive's members only
    the base
    names are used: it cannot write anywhere else.
    """
    try:
        if name.endswith((".tgz", ".tar.gz")):
            with tarfile.open(source) as archive:
                for member in archive:
                    if stream := archive.extractfile(member):
                        _place(stream, PurePosixPath(member.name).name, folder, wanted)
        else:
            with source.open("rb") as file:
                _place(file, name, folder, wanted)
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{name}: broken archive ({error})") from error


def _place(stream: IO[bytes], name: str, folder: Path, wanted: Collection[str]) -> None:
    stem = name.removesuffix(".gz")
    if stem in wanted:
        plain = gzip.GzipFile(fileobj=stream) if stem != name else stream
        with (folder / stem).open("wb") as file:
            shutil.copyfileobj(plain, file, 1 << 20)
