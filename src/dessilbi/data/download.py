"""Fetching a file from its official address: checksum, progress, resuming where an earlier attempt broke off.

Files are kept in the user's cache folder until the data set is in place, so that nothing unfinished is ever
where data sets are looked for. Needs ``pooch``.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .catalog import Remote

Progress = Callable[[str, int, int | None], None]
"""Called with what is being fetched, the bytes so far and the bytes in all (None if unknown)."""

CONNECT_SECONDS = 5
STALL_SECONDS = 30


def download(remote: Remote, progress: Progress) -> Path:
    """The file at ``remote`` with its checksum verified, in the cache.

    Raises:
        ConnectionError: no answer, an error status, or the connection broke; what has come is kept for the
            next attempt.
        ValueError: the checksum is wrong; nothing is kept.
        ModuleNotFoundError: pooch is not installed.
    """
    try:
        import pooch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("downloading needs pooch: pip install pooch", name="pooch") from error
    folder = Path(pooch.os_cache("dessilbi"))
    # Data sets share file names, so the checksum is part of the name.
    name = f"{remote.md5}-{remote.name}"
    with _quiet(pooch.get_logger()):
        try:
            path = pooch.retrieve(
                remote.url,
                f"md5:{remote.md5}",
                name,
                folder,
                downloader=_Resume(remote, folder / f"{name}.part", progress),
            )
        except ValueError as error:
            raise ValueError(f"{remote.url}: corrupt download, MD5 is not {remote.md5}") from error
    return Path(path)


class _Resume:
    """A pooch downloader that appends to what an earlier attempt left in ``part``."""

    def __init__(self, remote: Remote, part: Path, progress: Progress) -> None:
        self.remote = remote
        self.part = part
        self.progress = progress

    def __call__(self, url: str, output_file: str, _pooch: object) -> None:
        import requests

        try:
            self._fetch(url)
        except requests.ConnectTimeout as error:
            raise ConnectionError(f"{url}: no answer within {CONNECT_SECONDS} s") from error
        except requests.RequestException as error:
            raise ConnectionError(f"{url}: no connection, or it broke ({type(error).__name__})") from error
        os.replace(self.part, output_file)

    def _fetch(self, url: str) -> None:
        import requests

        have = self.part.stat().st_size if self.part.exists() else 0
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
        with requests.get(url, headers=headers, stream=True, timeout=(CONNECT_SECONDS, STALL_SECONDS)) as reply:
            if reply.status_code == 416:  # nothing after what is here: let the checksum judge it
                return
            if reply.status_code >= 400:
                raise ConnectionError(f"{url}: HTTP status {reply.status_code}")
            if reply.status_code != 206:
                have = 0
            total = _total(reply, have)
            with self.part.open("ab" if have else "wb") as file:
                for chunk in reply.iter_content(1 << 16):
                    file.write(chunk)
                    have += len(chunk)
                    self.progress(self.remote.name, have, total)
            if total is not None and have < total:
                raise ConnectionError(f"{url}: the connection broke after {have} of {total} bytes")


def _total(reply: Any, have: int) -> int | None:
    length = reply.headers.get("Content-Length")
    return have + int(length) if length else None


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """pooch writes to the screen through its logger; a library does not."""
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
