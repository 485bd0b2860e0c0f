"""Attention with fewer heads than its width has room for, in place of `nn.MultiheadAttention`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class HeadAttention(nn.Module):
    """`nn.MultiheadAttention` of which only some heads are left; its parameters have the same names.

    `nn.MultiheadAttention` insists on heads that fill its width, so that none can go. This one computes what it
    computes, without dropout of whole heads and without the packed fast path, for the heads that are left. Weights
    that are asked for are those of these heads, averaged over them.

    Args:
        embed_dim: the width of inputs and outputs.
        heads: the numbers of the heads that are left.
        all_heads: how many there were; masks that are given one a head are read by it.
        head_dim: the width of a head.
        bias, dropout, batch_first: as in `nn.MultiheadAttention`.
    """

    # What nn.TransformerEncoderLayer looks at before it takes a path of its own past this module.
    _qkv_same_embed_dim = False

    def __init__(
        self, embed_dim: int, heads: Sequence[int], all_heads: int, head_dim: int, *, bias: bool, dropout: float,
        batch_first: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed_dim, self.head_dim, self.all_heads = embed_dim, head_dim, all_heads
        self.heads = tuple(heads)
        self.dropout, self.batch_first = dropout, batch_first
        inner = len(self.heads) * head_dim
        self.in_proj_weight = nn.Parameter(torch.empty(3 * inner, embed_dim))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * inner)) if bias else None
        self.out_proj = nn.Linear(inner, embed_dim, bias=bias)

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether a module can be replaced by one of these."""
        return (
            type(module) is nn.MultiheadAttention
            and module._qkv_same_embed_dim
            and module.bias_k is None
            and not module.add_zero_attn
        )

    @classmethod
    def of(cls, module: nn.MultiheadAttention, heads: Sequence[int]) -> HeadAttention:
        """With a module's parameters, uncut."""
        new = cls(
            module.embed_dim, heads, module.num_heads, module.head_dim, bias=module.in_proj_bias is not None,
            dropout=module.dropout, batch_first=module.batch_first,
        )  # fmt: skip
        new.in_proj_weight, new.in_proj_bias, new.out_proj = module.in_proj_weight, module.in_proj_bias, module.out_proj
        return new.train(module.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        batched = query.ndim == 3
        axis = 0 if self.batch_first else 1
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (
            self._split(F.linear(x if batched else x.unsqueeze(axis), w, b))
            for x, w, b in zip((query, key, value), self.in_proj_weight.chunk(3), biases, strict=True)
        )
        mask = self._mask(q, key_padding_mask, attn_mask)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) * self.head_dim**-0.5
            weights = F.dropout(torch.softmax(scores if mask is None else scores + mask, -1), dropout)
            out = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        out = out if self.batch_first else out.transpose(0, 1)
        if not batched:
            return out.squeeze(axis), None if weights is None else weights.squeeze(0)
        return out, weights

    def _split(self, x: Tensor) -> Tensor:
        """(batch, heads, tokens, head_dim)."""
        x = x if self.batch_first else x.transpose(0, 1)
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim))
        return heads.transpose(1, 2)

    def _mask(self, q: Tensor, padding: Tensor | None, mask: Tensor | None) -> Tensor | None:
        """Both masks as what is added to the scores."""

        def added(m: Tensor) -> Tensor:
            return q.new_zeros(m.shape).masked_fill(m, -torch.inf) if m.dtype == torch.bool else m.to(q.dtype)

        total = None
        if mask is not None:
            mask = added(mask)
            if mask.ndim == 3:  # one a sample and head
                mask = mask.unflatten(0, (-1, self.all_heads))[:, list(self.heads)]
            total = mask
        if padding is not None:
            padding = added(padding if padding.ndim == 2 else padding.unsqueeze(0))[:, None, None, :]
            total = padding if total is None else total + padding
        return total

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, heads {', '.join(map(str, self.heads))} of {self.all_heads}, {self.head_dim} wide"
