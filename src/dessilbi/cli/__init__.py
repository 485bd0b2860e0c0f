"""The command line: one file a command, and no logic in them.

`app.py` has the group, the exit codes and the errors; `options.py` makes the options of `train` from the fields of
`Config`; `progress.py` shows what a long command does. Nothing here imports torch, NumPy or rich before a command
needs it: `dessilbi --help` answers at once.
"""

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0 done, 1 failed, 2 wrongly called, 130 interrupted."""
    try:
        from .app import run
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        print("dessilbi: the command line needs click: pip install 'dessilbi[train]'", file=sys.stderr)
        return 1
    return run(sys.argv[1:] if arguments is None else list(arguments))
