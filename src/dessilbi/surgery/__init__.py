"""Surgery: the only code that changes a network's shape.

`graph.py` finds out which channels go together, `rules.py` what operators do to them, `flow.py` where they are zero,
`plan.py` which of them go, `blocks.py` and `transition.py` what becomes of whole layers, `resize.py` makes the network
narrower and `state.py` takes the optimizer along. `shrink.py` is the way in.
"""

from dessilbi.surgery.shrink import shrink

__all__ = ["shrink"]
