"""Operators one by one, in the smallest network in which a mistake about them shows."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dessilbi import Selection, profile, shrink
from tests.surgery import zoo
from tests.surgery.zoo import checked_shrink


class Between(nn.Module):
    """What a function makes of the channels of one convolution is read by another."""

    def __init__(self, function, channels=8, **parameters):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.last = nn.Conv2d(channels, 4, 1)
        self.function = function
        for name, shape in parameters.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape)))

    def forward(self, x):
        return self.last(self.function(self, self.first(x)))


def in_place(self, x):
    """The view is read after the write, what it is a view of before it."""
    pooled = x.mean((2, 3), keepdim=True)
    flat = x.flatten(2)
    flat.mul_(0.5)
    return pooled + flat.view(x.shape[0], -1, 5, 7)


def written_through_a_view(self, x):
    x[:, 2:6].add_(self.shift)
    return x


def view_of_what_is_written(self, x):
    part = x[:, :4]
    x.add_(self.shift)
    return torch.cat([part, part], 1)


def passed_on_by_dropout(self, x):
    y = F.dropout(x, training=self.training)  # in evaluation the same tensor under another name
    y.add_(self.shift)
    return x


def shifted(self, x):
    """Zeros do not stay zeros where the bound is not on the other side of them."""
    return x.clamp(min=self.low)


def converted(self, x):
    """torch.export writes an assertion about the type beside a conversion."""
    return torch.sigmoid(x.double()).sub(0.5).float()


# name -> the function, its parameters, the channels of the second convolution, and how many of eight channels, of
# which three are off, are left; None where a refusal is right.
FUNCTIONS = {
    "clamp by numbers": (lambda self, x: x.clamp(-1, 1), {}, 5),
    "clamp above zero": (lambda self, x: x.clamp(min=0.1), {}, 8),
    "clamp by a tensor": (shifted, {"low": (1,)}, 8),
    "clamp by a tensor for each channel": (lambda self, x: torch.clamp(x, max=self.high), {"high": (8, 1, 1)}, 8),
    "power by a number": (lambda self, x: x**2, {}, 5),
    "power by a negative number": (lambda self, x: (x.abs() + 1) ** -1, {}, 8),
    "power by a tensor": (lambda self, x: x.abs() ** self.power, {"power": (1,)}, 8),
    "power by a tensor for each channel": (lambda self, x: x.abs() ** self.power, {"power": (8, 1, 1)}, 8),
    "logsumexp": (lambda self, x: torch.logsumexp(x, (2, 3), keepdim=True), {}, 8),
    "sum": (lambda self, x: torch.sum(x, (2, 3), keepdim=True), {}, 5),
    "a conversion": (converted, {}, 8),
    "a conversion and back": (lambda self, x: x.double().mul(2).float(), {}, 5),
    "a write into a view": (in_place, {}, 5),
    "a write through a view": (written_through_a_view, {"shift": (4, 1, 1)}, None),
    "a view of what is written": (view_of_what_is_written, {"shift": (8, 1, 1)}, None),
    "a write behind dropout": (passed_on_by_dropout, {"shift": (8, 1, 1)}, None),
    "where": (lambda self, x: torch.where(x > 0, x, 0.1 * x), {}, 5),
    "where with a constant": (lambda self, x: torch.where(x > 0, x, 0.1), {}, 8),
    "masked_fill": (lambda self, x: x.masked_fill(x < 0.1, 0.0), {}, 5),
    "masked_fill with a constant": (lambda self, x: x.masked_fill(x < 0.1, 0.1), {}, 8),
    "addcmul": (lambda self, x: torch.addcmul(x, x, self.scale), {"scale": (8, 1, 1)}, 5),
    "addcmul of a shift": (lambda self, x: torch.addcmul(self.scale, x, x), {"scale": (8, 1, 1)}, 8),
    "lerp": (lambda self, x: torch.lerp(x, F.relu(x), 0.3), {}, 5),
    "a map over the pixels": (lambda self, x: x * self.map[:, :, 1:6], {"map": (1, 1, 7, 7)}, 5),
    "einsum with a parameter": (lambda self, x: torch.einsum("bchw,cd->bdhw", x, self.mix), {"mix": (8, 8)}, 8),
    "a comparison with each channel's parameter": (
        lambda self, x: x * (x > self.bound).float(), {"bound": (8, 1, 1)}, 5),
    "the larger of two": (lambda self, x: torch.max(x, -x), {}, 5),
    "the larger of two with a parameter": (lambda self, x: torch.max(x, self.low), {"low": (8, 1, 1)}, 8),
    "a remainder": (lambda self, x: torch.remainder(x, self.by), {"by": (8, 1, 1)}, 5),
    "expand_as": (lambda self, x: x * x.mean((2, 3), keepdim=True).expand_as(x), {}, 5),
    "reshape_as": (lambda self, x: x.flatten(0, 1).reshape_as(x), {}, 5),
    "view_as": (lambda self, x: x.flatten(2).view_as(x), {}, 5),
    "norm over pixels": (lambda self, x: x / (1 + torch.linalg.vector_norm(x, dim=(2, 3), keepdim=True)), {}, 5),
    "norm over channels": (lambda self, x: x / (1 + torch.linalg.vector_norm(x, dim=1, keepdim=True)), {}, 8),
    "groups written into the code": (lambda self, x: F.group_norm(x, 4), {}, 8),
    "zeros of the same shape": (lambda self, x: x + torch.zeros_like(x), {}, 5),
    "slopes that are computed": (lambda self, x: F.prelu(x, self.slope.abs()), {"slope": (8,)}, 8),
    "einsum channel by channel": (lambda self, x: torch.einsum("bchw,c->bchw", x, self.scale), {"scale": (8,)}, 5),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_between_two_convolutions(name):
    function, parameters, left = FUNCTIONS[name]
    net = zoo.Net(lambda: Between(function, **parameters), zoo._images(3, 5, 7))
    model = net.build()
    for part in parameters:
        getattr(model, part).data.uniform_(0.2, 0.9)
    if name == "a map over the pixels":
        model.map.data[:, :, 3] = 0  # nothing comes through a row of pixels, which stays nevertheless
    sel = Selection({"first.weight": torch.tensor([1, 0, 1, 1, 0, 1, 1, 0]).bool()})
    if left is None:
        before = zoo.snapshot(model)
        with pytest.raises(ValueError, match="add_"):
            shrink(model, sel, net.inputs(2))
        assert zoo.unchanged(model, before)
        return
    small = checked_shrink(net, model, sel)
    assert (small.first.out_channels, small.last.in_channels) == (left, left)


@pytest.mark.parametrize(
    ("name", "left"),
    [("power by a number", 5), ("power by a tensor for each channel", 8), ("clamp by a tensor for each channel", 8),
     ("clamp above zero", 5), ("where with a constant", 5), ("addcmul of a shift", 5)],
)  # fmt: skip
def test_channels_that_nobody_reads(name, left):
    function, parameters, _ = FUNCTIONS[name]
    net = zoo.Net(lambda: Between(function, **parameters), zoo._images(3, 5, 7))
    model = net.build()
    read = torch.tensor([1, 0, 1, 1, 0, 1, 1, 0]).bool()
    small = checked_shrink(net, model, Selection({"last.weight": read.view(1, 8, 1, 1).expand(4, 8, 1, 1)}))
    assert (small.first.out_channels, small.last.in_channels) == (left, left)


def test_what_a_padding_carries_is_not_what_stands_at_its_place():
    """Of twelve channels the first and the last three are new: what nobody reads is counted behind the first."""
    net = zoo.Net(
        lambda: Between(lambda self, x: F.pad(x, (0, 0, 0, 0, 1, 3), value=1.0), channels=12), zoo._images(3, 5, 7)
    )
    read = torch.tensor([1, 1, 0, 1, 1, 0, 0, 1, 1, 1, 1, 1]).bool()
    sel = Selection({"last.weight": read.view(1, 12, 1, 1).expand(4, 12, 1, 1)})
    small = checked_shrink(net, net.build(), sel)
    assert (small.first.out_channels, small.last.in_channels) == (5, 9)


def test_gated_linear_units_keep_both_halves_alike():
    net = zoo.Net(lambda: Between(lambda self, x: F.glu(x, 1), channels=4), zoo._images(3, 5, 7))
    model = net.build()
    # A channel goes if its half is off; its gate alone would leave half of it.
    sel = Selection({"first.weight": torch.tensor([1, 0, 1, 0, 1, 0, 0, 1]).bool()})
    small = checked_shrink(net, model, sel)
    assert (small.first.out_channels, small.last.in_channels) == (4, 2)


class Borrows(nn.Module):
    """A tensor that keeps its channels is given the sizes of one that could lose some."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.last = nn.Conv2d(8, 6, 1)
        self.head = nn.Conv2d(6, 4, 1)

    def forward(self, x):
        x = F.relu(self.first(x))
        b, c, h, w = x.shape
        y = torch.cos(self.second(x)).flatten(2).view(b, c, h, w)
        return self.head(F.relu(self.last(y)))


def test_sizes_that_are_read_off_another_tensor():
    net = zoo.Net(Borrows, zoo._images(3, 5, 7))
    model = net.build()
    half = torch.arange(8) < 4
    sel = Selection({"first.weight": half, "last.weight": torch.arange(6) < 4})
    small = checked_shrink(net, model, sel)
    assert (small.first.out_channels, small.second.out_channels, small.head.in_channels) == (8, 8, 4)
    report = profile(model, net.inputs(2))
    assert (report.parameters_of(sel), report.macs_of(sel)) == (
        zoo.parameters(small), profile(small, net.inputs(2)).macs
    )  # fmt: skip


# -- attention, written by hand ----------------------------------------------------------------------------------


def with_einsum(q, k, v):
    weights = torch.einsum("b h i d, b h j d -> b h i j", q, k).div(2).softmax(-1)
    return torch.einsum("bhij,bhjd->bhid", weights, v)


def with_a_mask(q, k, v):
    seen = torch.ones(q.shape[2], q.shape[2]).tril()
    scores = (q @ k.transpose(-2, -1) / 2).masked_fill(seen == 0, -math.inf)
    return F.softmax(scores, -1) @ v


def with_where(q, k, v):
    seen = torch.ones(1, 1, q.shape[2], q.shape[2], dtype=torch.bool).tril()
    scores = torch.where(seen, q @ k.transpose(-2, -1) / 2, torch.finfo(q.dtype).min)
    return F.softmax(scores, -1) @ v


class Heads(nn.Module):
    """Three heads of four channels each; how many there are stands nowhere in the code."""

    def __init__(self, attend):
        super().__init__()
        self.qkv = nn.Linear(10, 36)
        self.out = nn.Linear(12, 10)
        self.head = nn.Linear(10, 4)
        self.attend = attend

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.head(x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("attend", [with_einsum, with_a_mask, with_where])
def test_heads_go_whole(attend):
    net = zoo.Net(lambda: Heads(attend), zoo._images(5, 10))
    model = net.build()
    mask = torch.ones(3, 3, 4, dtype=torch.bool)
    mask[:, 1] = False  # q, k and v of the second head
    mask[:, 0, 2] = False  # a part of the first one
    sel = Selection({"qkv.weight": mask.flatten()})
    small = checked_shrink(net, model, sel)
    assert (small.qkv.out_features, small.out.in_features) == (24, 8)
    report = profile(small, net.inputs(2))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        small(net.inputs(2))
    assert profile(model, net.inputs(2)).macs_of(sel) == report.macs == counter.get_total_flops() // 2


class Biased(Heads):
    """Every head adds a number of its own for every distance, which a small network makes of it."""

    def __init__(self, after=lambda bias: bias):
        super().__init__(None)
        self.distance, self.bias = nn.Embedding(9, 5), nn.Linear(5, 3)
        self.after = after

    def forward(self, x):
        place = torch.arange(x.shape[1])
        bias = self.after(self.bias(F.relu(self.distance(place[:, None] - place + 4))).permute(2, 0, 1))
        self.attend = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return super().forward(x)


@pytest.mark.parametrize(("after", "left"), [(lambda bias: bias, 2), (lambda bias: bias.softmax(0), 3)])
def test_the_biases_of_attention_go_with_its_heads(after, left):
    net = zoo.Net(lambda: Biased(after), zoo._images(5, 10))
    model = net.build()
    mask = torch.ones(3, 3, 4, dtype=torch.bool)
    mask[:, 1] = False
    small = checked_shrink(net, model, Selection({"qkv.weight": mask.flatten()}))
    assert (small.qkv.out_features, small.bias.out_features, small.bias.in_features) == (12 * left, left, 5)


def test_a_size_that_depends_on_the_data_is_refused():
    """Were it followed, the network of the example would not be that of other inputs."""
    net = zoo.Net(lambda: Between(lambda self, x: x[:, self.read.abs() >= 0], read=(8,)), zoo._images(3, 5, 7))
    model = net.build()
    with pytest.raises(ValueError, match=r"aten.index.Tensor to make a tensor whose size depends on the data"):
        shrink(model, Selection({"first.weight": torch.arange(8) < 4}), net.inputs(2))


def test_products_of_three_are_counted_from_left_to_right():
    class Three(nn.Module):
        def forward(self, x, y, z):
            return torch.einsum("ij,jk,kl->il", x, y, z)

    sizes = (torch.randn(3, 5), torch.randn(5, 7), torch.randn(7, 2))
    assert profile(Three(), sizes).macs == 3 * 5 * 7 + 3 * 7 * 2


class Attends(nn.Module):
    """What attention reads can lose channels though none of its heads goes."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 12)
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)
        self.head = nn.Linear(12, 4)

    def forward(self, x):
        x = F.relu(self.embed(x))
        return self.head(self.attention(x, x, x, need_weights=False)[0])


def test_attention_that_loses_only_what_it_reads():
    net = zoo.Net(Attends, zoo._images(5, 6))
    model = net.build()
    small = checked_shrink(net, model, Selection({"embed.weight": torch.arange(12) % 3 > 0}))
    assert small.embed.out_features == small.attention.in_proj_weight.shape[1] == 8
    assert small.attention.in_proj_weight.shape[0] == 36


class SplitInput(nn.Module):
    """A convolution in groups that reads all of its channels: its groups can all stay, and read less."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 12, 3, padding=1)
        self.grouped = nn.Conv2d(12, 4, 3, padding=1, groups=2)

    def forward(self, x):
        return self.grouped(F.relu(self.first(x)))


def test_multiply_adds_of_groups():
    net = zoo.Net(SplitInput, zoo._images(3, 5, 7))
    model = net.build()
    report = profile(model, net.inputs(2))
    for off in ((0, 1, 6, 11), (2, 3, 4)):  # two of each group; three of one, which the other cannot spare
        mask = torch.ones(12, dtype=torch.bool)
        mask[list(off)] = False
        sel = Selection({"first.weight": mask})
        small = checked_shrink(net, model, sel)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            small(net.inputs(2))
        assert report.macs_of(sel) == counter.get_total_flops() // 2
    assert report.macs_of(Selection({"first.weight": torch.arange(12) % 6 > 1})) < report.macs


class Blurred(nn.Module):
    """A convolution in groups whose weight is computed: one kernel for all channels."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 6, 1)
        self.head = nn.Conv2d(6, 4, 1)
        self.kernel = nn.Parameter(torch.ones(1, 1, 3, 3))

    def forward(self, x):
        x = self.first(x)
        x = F.conv2d(x, self.kernel.expand(x.shape[1], -1, -1, -1), stride=2, groups=x.shape[1])
        return self.head(F.relu(self.last(x)))


def test_multiply_adds_of_groups_whose_weight_is_computed():
    net = zoo.Net(Blurred, zoo._images(3, 5, 7))
    model = net.build()
    sel = Selection({"first.weight": torch.arange(8) > 2, "last.weight": torch.arange(6) > 2})
    small = checked_shrink(net, model, sel)
    assert (small.first.out_channels, small.last.out_channels) == (8, 3)
    assert profile(model, net.inputs(2)).macs_of(sel) == profile(small, net.inputs(2)).macs
