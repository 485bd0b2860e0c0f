"""The methods the paper compares with, on the same interfaces.

Before, after and between trainings: functions that return a :class:`~dessilbi.Selection`.

=================  =====================================================================================================
`magnitude`        the largest weights; with ``conv="filter"`` the filters of largest l1 norm
`snip`             before training, by the sensitivity of the loss
`slim`             filters by the scales of the normalisation that follows them; train with `Slimming`
`iterative`        train, take the smallest fifth of what is left, and again, rewound or not (Iterative-Pruning-A);
                   `ladder` and `rounds_to` say how often
`random_like`      as many in every layer as another selection, anywhere
`random_global`    as many in all, anywhere
`allocate`         what they share: how much every layer gets, as one of `ALLOCATIONS`
=================  =====================================================================================================

During training: a :class:`Companion`, made with the model and its optimizer (``method=`` in a configuration).

=================  =====================================================================================================
`Gradual`          magnitude pruning, more and more of it on a cubic schedule (Iterative-Pruning-B)
`SoftFilters`      at the end of every epoch the smallest filters are set to zero, and may come back
`L1`               an l1 penalty, on filters a group lasso, by proximal steps
`Slimming`         an l1 penalty on the scales of normalisations
=================  =====================================================================================================

In the place of SGD or DessiLBI: optimizers (``optimizer=``).

=================  =====================================================================================================
`AdaBound`         Adam whose step sizes are bounded more and more tightly, SGD in the end
`LinBreg`          linearized Bregman iterations: the weights themselves are sparse; start them with `sparse_start`
`AdaBreg`          the same with the directions of Adam
=================  =====================================================================================================
"""

from dessilbi.baselines.adabound import AdaBound
from dessilbi.baselines.allocation import ALLOCATIONS, allocate
from dessilbi.baselines.bregman import AdaBreg, LinBreg, sparse_start
from dessilbi.baselines.chance import random_global, random_like
from dessilbi.baselines.companion import Companion
from dessilbi.baselines.gradual import Gradual
from dessilbi.baselines.iterative import iterative, ladder, rounds_to
from dessilbi.baselines.l1 import L1
from dessilbi.baselines.magnitude import magnitude
from dessilbi.baselines.slimming import Slimming, slim
from dessilbi.baselines.snip import snip
from dessilbi.baselines.softfilters import SoftFilters

__all__ = [
    "ALLOCATIONS",
    "L1",
    "AdaBound",
    "AdaBreg",
    "Companion",
    "Gradual",
    "LinBreg",
    "Slimming",
    "SoftFilters",
    "allocate",
    "iterative",
    "ladder",
    "magnitude",
    "random_global",
    "random_like",
    "rounds_to",
    "slim",
    "snip",
    "sparse_start",
]
