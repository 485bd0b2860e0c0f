"""Training runs that survive: a configuration, one loop, and a folder that holds all there is to know about a run.

    config = presets.get("paper/lenet-mnist-dessilbi-mom").replace(data_root="/data")
    summary = train(config, "runs/lenet")              # stop it whenever you like …
    summary = train(config, "runs/lenet", resume=True) # … it goes on as if nothing had happened

`config.py` and `presets.py` import no torch, so that the command line can list and check settings at once. Nothing
here prints: what is worth knowing goes into the run folder and to the `progress` object that the caller passes.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dessilbi.training.config import Config, differences
    from dessilbi.training.loop import train
    from dessilbi.training.run import Run
    from dessilbi.training.session import TrainingDiverged

__all__ = ["Config", "Run", "TrainingDiverged", "differences", "train"]

_HOMES = {
    "Config": "config",
    "differences": "config",
    "Run": "run",
    "TrainingDiverged": "session",
    "train": "loop",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
