"""Where a run took place: what a number cannot be compared without."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dessilbi import __version__
from dessilbi.training.distribution import World


def facts(world: World, command: str = "") -> dict[str, Any]:
    """Versions, device, commit and command, as plain values."""
    device = world.device
    return {
        "command": command or " ".join(sys.argv),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        **versions(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "processes": world.size,
        "threads": torch.get_num_threads(),
    }


def versions() -> dict[str, Any]:
    """Of this library and what it stands on, and the number of cores."""
    return {
        "dessilbi": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "cuda": torch.version.cuda,
        "platform": platform.platform(),
        "cores": os.cpu_count(),
    }


def _processor() -> str:
    """The processor's name; what :mod:`platform` knows of it is empty on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.processor() or "cpu")


def commit() -> str | None:
    """The commit of the checkout that this code runs from, with a + if files were changed; None outside of one.

    Where the files came without git, the variable DESSILBI_COMMIT may say it: ``$(git rev-parse HEAD)``.
    """
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        # A package that lies in the site-packages of someone else's checkout is not of that checkout.
        if not git("ls-files", "--error-unmatch", "../__init__.py"):
            return os.environ.get("DESSILBI_COMMIT")
        commit = git("rev-parse", "HEAD")
        return commit + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("DESSILBI_COMMIT")
