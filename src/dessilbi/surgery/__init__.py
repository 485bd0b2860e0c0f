"""Surgery: the only code that changes a network's shape.

`graph.py` finds out which channels go together, `rules` what operators do to them, `flow.py` where they are zero,
`plan.py` which of them go, `blocks.py` and `transition.py` what becomes of whole layers, `resize.py` makes the network
narrower and `state.py` takes the optimizer along. `shrinking.py`, `completion.py`, `channels.py`, `costs.py` and
`saving.py` are the ways in. `widening.py` goes the other way, with a plan (`widening_plan.py`) that is the same read
backwards.
"""

from dessilbi.surgery.completion import complete
from dessilbi.surgery.costs import Profile, profile
from dessilbi.surgery.saving import load_shrunk, save_shrunk
from dessilbi.surgery.shrinking import shrink
from dessilbi.surgery.widening import widen

__all__ = ["Profile", "complete", "load_shrunk", "profile", "save_shrunk", "shrink", "widen"]
