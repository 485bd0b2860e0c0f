"""DessiLBI: find the structure of a neural network while it trains.

The public names are loaded when they are first used, so that `dessilbi --help` need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dessilbi.groups import Labels, Partition, Slices, transposed_filters
    from dessilbi.optim import DessiAdamW, DessiLBI
    from dessilbi.path import NEVER, Path
    from dessilbi.ranking import select
    from dessilbi.roles import param_groups
    from dessilbi.selection import Selection
    from dessilbi.settling import Settling
    from dessilbi.surgery import Profile, complete, load_shrunk, profile, save_shrunk, shrink, widen
    from dessilbi.threshold import TargetThreshold
    from dessilbi.ticket import Ticket

__version__ = "0.1.0"

_HOME = {
    "DessiAdamW": "optim",
    "DessiLBI": "optim",
    "param_groups": "roles",
    "Labels": "groups",
    "Partition": "groups",
    "Slices": "groups",
    "transposed_filters": "groups",
    "NEVER": "path",
    "Path": "path",
    "Selection": "selection",
    "select": "ranking",
    "Settling": "settling",
    "Profile": "surgery",
    "complete": "surgery",
    "load_shrunk": "surgery",
    "profile": "surgery",
    "save_shrunk": "surgery",
    "shrink": "surgery",
    "widen": "surgery",
    "TargetThreshold": "threshold",
    "Ticket": "ticket",
}

__all__ = [
    "NEVER",
    "DessiAdamW",
    "DessiLBI",
    "Labels",
    "Partition",
    "Path",
    "Profile",
    "Selection",
    "Settling",
    "Slices",
    "TargetThreshold",
    "Ticket",
    "complete",
    "load_shrunk",
    "param_groups",
    "profile",
    "save_shrunk",
    "select",
    "shrink",
    "transposed_filters",
    "widen",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dessilbi' has no attribute {name!r}")
    return getattr(import_module(f"dessilbi.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
