r"""SGD with an l1 penalty: minimise loss + λ‖W‖₁, with exact zeros.

With filters as groups it is the group lasso of Wen, Wu, Wang, Chen, Li, "Learning structured sparsity in deep neural
networks", NeurIPS 2016. The proximal step is that of Duchi, Singer, "Efficient online and batch learning using forward
backward splitting", JMLR 2009; see :mod:`~dessilbi.baselines.penalty` for why it is one.

The penalty shrinks what it keeps as much as what it removes: at a λ that leaves few weights the network has lost
accuracy (the paper: ResNet-20 falls from 90.31 % to 67.60 %). Fine-tune what `selection` leaves, without the penalty.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from dessilbi.baselines.penalty import Penalty
from dessilbi.baselines.tensors import Excluded, partitioned, selection, size
from dessilbi.selection import Selection


class L1(Penalty):
    """λ‖W‖₁ on the weights, at the filter level λ Σ_g ‖W_g‖₂ on the filters.

    Args:
        model, optimizer: what is trained.
        lam: λ; 1e-5 to 1e-3 for image networks, less for larger ones.
        conv, linear, exclude: what is penalised, as in :func:`~dessilbi.baselines.magnitude`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        lam: float = 1e-4,
        *,
        conv: str | None = "weight",
        linear: str | None = "weight",
        exclude: Excluded = (),
    ) -> None:
        super().__init__(optimizer, lam, partitioned(model, conv, linear, exclude))

    @property
    @torch.no_grad()
    def selection(self) -> Selection:
        """What is not zero now."""
        masks = {name: size(p, part) != 0 for name, (p, part) in self._found.items()}
        return selection(masks, method="l1", lam=self.lam)
