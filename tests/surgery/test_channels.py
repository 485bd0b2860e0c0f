"""Which filters `param_groups(conv="channel")` joins, against lists made by hand."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dessilbi import DessiLBI, Path, Selection, TargetThreshold, param_groups, select, shrink
from dessilbi.models import create
from tests.surgery import zoo

IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def joint(groups):
    """For every convolution, the number of the joint group of each filter; None where it shares none."""
    (group,) = [g for g in groups if isinstance(g["group"], (list, tuple))]
    return {
        name: part.index.tolist() if part.kind == "channel" else None
        for (name, _), part in zip(group["params"], group["group"], strict=True)
    }


def families(groups):
    (group,) = [g for g in groups if isinstance(g["group"], (list, tuple))]
    found = {}
    for (name, _), part in zip(group["params"], group["group"], strict=True):
        if part.kind == "channel":
            found.setdefault(id(part.coupling), set()).add(name)
    return sorted(found.values(), key=min)


def test_the_streams_of_a_cifar_resnet():
    model = create("resnet20")
    groups = param_groups(model, conv="channel", linear=None, example_inputs=IMAGES)
    numbers = joint(groups)
    assert [name for name, index in numbers.items() if index is None] == [
        f"layer{stage}.{block}.conv1.weight" for stage in (1, 2, 3) for block in (0, 1, 2)
    ]
    assert families(groups) == [
        {"conv1.weight", *(f"layer1.{i}.conv2.weight" for i in range(3))},
        {f"layer2.{i}.conv2.weight" for i in range(3)},
        {f"layer3.{i}.conv2.weight" for i in range(3)},
    ]
    for name, width in (("conv1.weight", 16), ("layer2.0.conv2.weight", 32), ("layer3.2.conv2.weight", 64)):
        assert numbers[name] == list(range(width))


def test_depthwise_convolutions_go_with_the_layer_before_them():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.expand, self.deep, self.project = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, groups=6), nn.Conv2d(6, 4, 1)
            self.head = nn.Conv2d(4, 2, 1)

        def forward(self, x):
            return self.head(self.project(F.relu6(self.deep(F.relu6(self.expand(x))))))

    groups = param_groups(Block(), conv="channel", example_inputs=IMAGES)
    assert families(groups) == [{"deep.weight", "expand.weight"}]
    assert joint(groups)["deep.weight"] == list(range(6))
    assert joint(groups)["head.weight"] is None


def test_a_stream_can_be_removed_where_filters_alone_would_not_agree():
    torch.manual_seed(0)
    removed = {}
    for conv in ("filter", "channel"):
        torch.manual_seed(0)
        model = zoo.randomise(create("resnet20"), 0)
        optimizer = DessiLBI(
            param_groups(model, conv=conv, linear=None, example_inputs=IMAGES), lr=0.1, nu=10.0, momentum=0.9
        )
        threshold, path = TargetThreshold(optimizer, keep=0.5, ramp=0, per_layer=True), Path(model, optimizer)
        optimizer.zero_grad()
        F.cross_entropy(model(IMAGES), torch.arange(4)).backward()
        optimizer.step()
        generator = torch.Generator().manual_seed(1)
        for p, _ in optimizer.penalised():  # filters of very different sizes, in every layer others
            sizes = torch.randn(len(p), 1, 1, 1, generator=generator).exp()
            optimizer.dual(p).copy_(sizes * torch.randn(p.shape, generator=generator))
        threshold.step(1.0)
        path.record(1)
        sel = Selection.of(model, optimizer)
        writers = ["conv1.weight", *(f"layer1.{i}.conv2.weight" for i in range(3))]
        if conv == "channel":
            assert all(torch.equal(sel[name], sel[writers[0]]) for name in writers)
            chosen = select(path, at=0)
            assert all(torch.equal(chosen[name], chosen[writers[0]]) for name in writers)
        small = shrink(model, sel, IMAGES, optimizer=optimizer)
        removed[conv] = 16 - small.conv1.out_channels
        with torch.no_grad(), sel.applied(model):
            assert zoo.outputs_close(model.eval()(IMAGES), small.eval()(IMAGES))
        model.train(), small.train()
        # The optimizer goes on with the smaller network, its joint groups among the filters that are left.
        optimizer.zero_grad()
        F.cross_entropy(small(IMAGES), torch.arange(4)).backward()
        optimizer.step()
        for p, _ in optimizer.penalised():
            assert optimizer.support(p).shape == (len(p),)
    assert removed["channel"] == 8
    assert removed["filter"] <= 3  # four writers, each without it by chance: 16 / 2⁴


def test_example_inputs_are_asked_for():
    with pytest.raises(ValueError, match="conv='channel'.*example_inputs"):
        param_groups(create("resnet20"), conv="channel")


def test_a_target_takes_joint_groups_whole_and_counts_them_once(tmp_path):
    model = create("resnet20", widths=(4, 6, 8))
    optimizer = DessiLBI(param_groups(model, conv="channel", linear=None, example_inputs=IMAGES), lr=0.1, lam=1e9)
    path = Path(model, optimizer)
    optimizer.zero_grad()
    F.cross_entropy(model(IMAGES), torch.arange(4)).backward()
    optimizer.step()
    generator = torch.Generator().manual_seed(1)
    squares = {}
    for name, p in model.named_parameters():
        if p.ndim == 4:
            v = optimizer.dual(p).copy_(torch.randn(p.shape, generator=generator)).flatten(1).square().sum(1)
            stage = name.partition(".")[0] if "conv2" in name else "layer1" if name == "conv1.weight" else name
            for k in range(len(p)):
                squares[stage, k] = squares.get((stage, k), 0.0) + float(v[k])
    path.record(1)
    path.save(tmp_path / "path")
    best = sorted(squares, key=lambda key: -squares[key])[: len(squares) // 2]  # no group has entered: by norm alone
    for source in (path, Path.load(tmp_path / "path")):
        sel = select(source, keep=0.5, min_keep=0)
        for name, mask in sel.items():
            stage = name.partition(".")[0] if "conv2" in name else "layer1" if name == "conv1.weight" else name
            assert mask.tolist() == [(stage, k) in best for k in range(len(mask))], name
    bounded = select(path, keep=0.6, max_prune=0.5)
    streams = [bounded[f"layer2.{i}.conv2.weight"] for i in range(3)]
    assert all(torch.equal(mask, streams[0]) and mask.sum() >= 3 for mask in streams)
