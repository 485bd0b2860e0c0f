"""What operators do to channels: one small rule a family of operators.

A rule answers three questions about a node:

    link   how do the atoms of its inputs and parameters become those of its output, and what is tied together?
    zero   where is the output zero, given where the inputs are, whatever else they hold?
    live   which input positions matter, given the output positions that matter (and are not zero anyway)?

`zero` goes forward through the network and `live` backward; a position that is zero or does not matter can go. All
tensors of positions are compact: axes along which nothing changes have size one.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from dessilbi.surgery.nodes import in_place, name_of, returns_nothing
from dessilbi.surgery.rules.affine import Addmm, Affine, Embedding
from dessilbi.surgery.rules.base import CONSTANT, PINNED, UNKNOWN, Rule, listed
from dessilbi.surgery.rules.elementwise import Clamp, Elementwise, Glu, Power, Prelu, Product, Softmax, Unary, Zeros
from dessilbi.surgery.rules.movement import Concatenation, Getitem, Movement, Padding
from dessilbi.surgery.rules.norms import GroupNorm, LayerNorm, Norm
from dessilbi.surgery.rules.products import Attention, Einsum, Matmul
from dessilbi.surgery.rules.spatial import Reduction, Spatial

if TYPE_CHECKING:
    from dessilbi.surgery.graph import Graph

__all__ = [
    "Affine",
    "Attention",
    "Concatenation",
    "Einsum",
    "Elementwise",
    "GroupNorm",
    "Matmul",
    "Movement",
    "Rule",
    "Unary",
    "find",
    "learn",
]


_SAME = (
    "relu relu6 leaky_relu tanh gelu silu mish elu selu celu hardswish softsign softshrink hardshrink tanhshrink rrelu "
    "abs absolute neg negative sqrt square sin tan sinh asin atan asinh erf sign sgn round floor ceil trunc frac "
    "nan_to_num dropout feature_dropout alpha_dropout feature_alpha_dropout clone contiguous detach detach_copy alias "
    "to _to_copy type_as float half double bfloat16 lift_fresh_copy positive expm1 log1p identity native_dropout "
    "dropout2d"
)
_OTHER = (
    "sigmoid hardsigmoid softplus exp exp2 log log2 log10 cos cosh acos rsqrt reciprocal log_sigmoid logsigmoid erfc "
    "threshold logical_not isnan isinf bitwise_not ones_like full_like"
)
_SPATIAL = (
    "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
    "adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d upsample_nearest1d "
    "upsample_nearest2d upsample_nearest3d upsample_bilinear2d upsample_linear1d upsample_trilinear3d "
    "upsample_bicubic2d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa max_pool2d_with_indices"
)
_MOVEMENT = (
    "view reshape _unsafe_view flatten unflatten permute transpose t numpy_T swapaxes movedim squeeze unsqueeze expand "
    "slice select narrow split split_with_sizes chunk unbind index index_select flip roll repeat repeat_interleave "
    "tile pixel_shuffle pixel_unshuffle channel_shuffle unfold stack ravel expand_as view_as reshape_as diagonal mT "
    "tensor_split rot90"
)
_REDUCTION = "mean sum amax amin var std logsumexp max min norm linalg_vector_norm"
_SUM = "add sub rsub maximum minimum fmax fmin hypot"
_QUOTIENT = "div true_divide divide floor_divide fmod remainder copysign"
_AFFINE = "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d linear"
_RULES: dict[str, Rule] = {
    **dict.fromkeys(_SAME.split(), Unary(True)),
    **dict.fromkeys(_OTHER.split(), Unary(False)),
    "zeros_like": Zeros(),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"), CONSTANT),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max", "hardtanh", "clip"), Clamp()),
    **dict.fromkeys(("softmax", "log_softmax", "_softmax", "_log_softmax", "cumsum", "cumprod"), Softmax()),
    **dict.fromkeys(_SPATIAL.split(), Spatial()),
    **dict.fromkeys(_REDUCTION.split(), Reduction()),
    **dict.fromkeys(_SUM.split(), Elementwise(torch.logical_and)),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), Elementwise(lambda a, b: (a & b).zero_())),
    **dict.fromkeys(("mul", "multiply"), Product()),
    **dict.fromkeys(_QUOTIENT.split(), Elementwise(lambda a, b: a)),
    **dict.fromkeys(("addcmul", "addcdiv"), Elementwise(lambda a, b, c: a & b, "self", "tensor1", "tensor2")),
    "lerp": Elementwise(lambda a, b, weight: a & b, "self", "end", "weight"),
    "where": Elementwise(lambda mask, a, b: a & b, "condition", "self", "other"),
    "masked_fill": Elementwise(lambda a, mask, b: a & b, "self", "mask", "value"),
    "glu": Glu(),
    **dict.fromkeys(_MOVEMENT.split(), Movement()),
    **dict.fromkeys(("cat", "concat", "concatenate"), Concatenation()),
    **dict.fromkeys(_AFFINE.split(), Affine()),
    **dict.fromkeys(("batch_norm", "instance_norm"), Norm()),
    **dict.fromkeys(("layer_norm", "rms_norm"), LayerNorm()),
    **dict.fromkeys(("matmul", "mm", "bmm"), Matmul()),
    "einsum": Einsum(),
    **dict.fromkeys(("argmax", "argmin", "topk", "sort", "baddbmm"), PINNED),
    "addmm": Addmm(),
    "prelu": Prelu(),
    **dict.fromkeys(("pow", "float_power"), Power()),
    "group_norm": GroupNorm(),
    "embedding": Embedding(),
    "scaled_dot_product_attention": Attention(),
    "pad": Padding(),
    "constant_pad_nd": Padding(),
    "getitem": Getitem(),
}  # fmt: skip


def learn(operator: str, rule: Rule) -> None:
    """Follow an operator from now on, by the name that it has in an exported graph without namespace and overload:
    "swish" for ``mine::swish.default``."""
    _RULES[operator] = rule


def find(g: Graph, n: fx.Node) -> Rule:
    """The rule for a node."""
    if n.target is operator.getitem:
        return _RULES["getitem"]
    reads, rule = g.inputs(n), _RULES.get(name_of(n), UNKNOWN)
    if isinstance(rule, Reduction) and g.calls[n].get("other") is not None:
        rule = _RULES["maximum"]  # torch.max and torch.min of two tensors
    if returns_nothing(n):  # an assertion about a type, which torch.export writes beside a conversion
        return CONSTANT
    value = n.meta.get("val")
    whole = isinstance(value, Tensor) and not value.is_floating_point()  # indices and masks
    if not reads or ((rule is UNKNOWN or whole) and not any(a.any() for x in reads for a in listed(g.present(x)))):
        return CONSTANT
    if in_place(n) and _is_seen(g, n):
        return UNKNOWN  # another tensor of the same memory changes too
    return rule


_SAME_MEMORY = ("contiguous", "to", "type_as", "float", "detach", "alias", "positive", "dropout", "feature_dropout")


def _is_seen(g: Graph, n: fx.Node) -> bool:
    """Whether what is written in place is read later through another view of the same memory."""

    def source(x: fx.Node) -> fx.Node | None:
        may_share = in_place(x) or name_of(x) in _SAME_MEMORY or isinstance(g.rules.get(x), (Movement, Getitem))
        return x.args[0] if may_share and x.args and isinstance(x.args[0], fx.Node) else None

    def memory(x: fx.Node) -> fx.Node:
        while (before := source(x)) is not None:
            x = before
        return x

    def tensor(x: fx.Node) -> fx.Node:
        while in_place(x) and isinstance(x.args[0], fx.Node):
            x = x.args[0]
        return x

    where = memory(n)
    others = [x for x in (where, *g.rules) if tensor(x) is not tensor(n) and memory(x) is where]
    return any(user not in g.calls for x in others for user in x.users)
