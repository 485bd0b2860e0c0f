"""Selections: by hand, from an optimizer, off a path; for a moment, for good, through a file."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import _global_optimizer_post_hooks

from dessilbi import NEVER, DessiAdamW, DessiLBI, Labels, Path, Selection, Slices, param_groups, select
from dessilbi.coupling import channels
from dessilbi.files import load_arrays, save_arrays
from dessilbi.groups import transposed_filters
from dessilbi.models import create

T, N = True, False


def trained(model: nn.Module, keep: dict[str, torch.Tensor], **groups: str | None) -> DessiLBI:
    """An optimizer whose support is `keep` for the tensors that are named, and nothing for the others."""
    optimizer = DessiLBI(param_groups(model, **groups), lr=0.1, lam=0.5)  # type: ignore[arg-type]
    for name, p in model.named_parameters():
        if name in keep:
            mask = keep[name].to(p.dtype)
            dual = mask.view(-1, *[1] * (p.ndim - 1)) if mask.ndim == 1 else mask
            optimizer.state[p]["dual"] = dual.expand_as(p).clone()
    return optimizer


# -- for a moment ------------------------------------------------------------------------------------------------


def test_a_masked_filter_is_absent_with_its_bias_and_normalisation() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 3))
    nn.init.ones_(model[1].bias)
    nn.init.ones_(model[0].bias)
    nn.init.ones_(model[3].bias)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    addresses = [p.data_ptr() for p in model.parameters()]
    kept, last = torch.tensor([True, False, True]), torch.tensor([False, True])
    optimizer = trained(model, {"0.weight": kept, "3.weight": last})
    x = torch.randn(4, 1, 8, 8)
    model.eval()
    with Selection.of(model, optimizer).applied(model):
        hidden = model[1](model[0](x))
        assert (hidden[:, 1] == 0).all()
        assert (hidden[:, [0, 2]] != 0).any()
        assert torch.equal(model[0].weight[0], before["0.weight"][0])
        assert model[0].bias.tolist() == [1, 0, 1]
        assert model[1].weight.tolist() == [1, 0, 1]
        assert model[1].bias.tolist() == [1, 0, 1]
        assert model[3].bias.tolist() == [0, 1]
        assert (model(x)[:, 0] == 0).all()
        assert [p.data_ptr() for p in model.parameters()] == addresses
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert [p.data_ptr() for p in model.parameters()] == addresses


def test_weights_are_masked_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    keep = torch.tensor([[True, False, True], [False, False, False]])
    optimizer = trained(model, {"0.weight": keep})
    bias = model[0].bias.clone()
    with Selection.of(model, optimizer).applied(model):
        assert torch.equal(model[0].weight != 0, keep)
        assert torch.equal(model[0].bias, bias)
        assert model[1].weight.tolist() == [1, 1]


def test_a_layer_that_is_out_is_zero_altogether() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3))
    selection = Selection.of(model, trained(model, {}, conv="layer"))
    assert selection.level == "layer"
    model.eval()
    nn.init.ones_(model[1].bias)
    with selection.applied(model):
        assert (model(torch.randn(2, 1, 5, 5)) == 0).all()


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_and_grouped_convolutions(groups: int) -> None:
    model = nn.Sequential(nn.ConvTranspose2d(4, 6, 3, groups=groups), nn.BatchNorm2d(6))
    optimizer = DessiLBI(param_groups(model), lr=0.1, lam=0.5)
    weight = model[0].weight
    kept = torch.tensor([1.0, 0, 1, 0, 0, 1])
    dual = kept.view(groups, 1, 6 // groups, 1, 1).expand(groups, 4 // groups, 6 // groups, 3, 3).reshape_as(weight)
    optimizer.state[weight]["dual"] = dual.clone()
    selection = Selection.of(model, optimizer)
    assert selection["0.weight"].tolist() == kept.bool().tolist()
    model.eval()
    nn.init.ones_(model[1].bias)
    with selection.applied(model):
        out = model(torch.randn(2, 4, 5, 5))
        assert [(out[:, i] != 0).any().item() for i in range(6)] == kept.bool().tolist()


def test_groups_that_are_not_filters_become_elementwise() -> None:
    """Columns, a partition of the user's own, and rows of a transposed convolution, which are its inputs."""
    columns, own, rows = nn.Linear(3, 2), nn.Linear(2, 2), nn.ConvTranspose1d(2, 2, 1)
    model = nn.Sequential(columns, own, rows)
    optimizer = DessiLBI(
        [
            {"params": [columns.weight], "group": "input"},
            {"params": [own.weight], "group": Labels(torch.tensor([[0, 1], [1, 1]]))},
            {"params": [rows.weight], "group": "filter"},
        ],
        lr=0.1,
        lam=0.5,
    )
    optimizer.state[columns.weight]["dual"] = torch.tensor([[1.0, 0, 0], [0, 0, 1]])
    optimizer.state[own.weight]["dual"] = torch.tensor([[0.0, 0], [0, 1]])
    optimizer.state[rows.weight]["dual"] = torch.tensor([[0.0, 1], [0, 0]]).view(2, 2, 1)
    selection = Selection.of(model, optimizer)
    assert selection["0.weight"].tolist() == [[T, N, T], [T, N, T]]
    assert selection["1.weight"].tolist() == [[N, T], [T, T]]
    assert selection["2.weight"].flatten(1).tolist() == [[T, T], [N, N]]
    assert selection.level == "weight"


@pytest.mark.parametrize(("name", "norms"), [("resnet20", 19), ("vgg16", 13), ("resnet18", 20), ("lenet5", 0)])
def test_the_normalisations_of_the_networks_are_found(name: str, norms: int) -> None:
    model = create(name)
    optimizer = DessiLBI(param_groups(model), lr=0.1)
    with Selection.of(model, optimizer).applied(model):
        off = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d) and not m.weight.any() and not m.bias.any()]
        assert len(off) == norms == len([m for m in model.modules() if isinstance(m, nn.BatchNorm2d)])


def test_restored_after_an_error() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3))
    model[0].weight.data[0, 0, 0, 0] = torch.nan
    before = model[0].weight.detach().clone()
    selection = Selection({"0.weight": torch.zeros(3, dtype=torch.bool)})
    with pytest.raises(RuntimeError, match="inside"), selection.applied(model):
        raise RuntimeError("inside" if not model[0].weight.any() else "not masked")
    assert torch.equal(model[0].weight.view(torch.int32), before.view(torch.int32))


def test_names_through_wrappers() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    selection = Selection({"0.weight": torch.tensor([T, N])})
    for wrapped in (torch.compile(model), nn.DataParallel(model)):
        assert selection.masks(wrapped).keys() == {"0.weight", "0.bias"}
        with selection.applied(wrapped):
            assert not model[0].weight[1].any()


class Rooted(nn.Module):
    """With a parameter of its own, which FSDP2 leaves gathered after a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.table = nn.Parameter(torch.randn(5, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc(x) @ self.table.T
        return out


def test_sharded_parameters() -> None:
    """On a mesh of one rank, which is enough to have DTensors and gathered copies of them."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, init_device_mesh

    alone = Rooted()
    model = copy.deepcopy(alone)
    kept = torch.rand(5, 3) > 0.5
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(model.fc, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = DessiLBI([("table", model.table)], lr=0.1, lam=0.5)
        optimizer.state[model.table]["dual"] = DTensor.from_local(kept.float(), mesh, model.table.placements)
        x = torch.randn(2, 4)
        with torch.no_grad():
            dense = model(x)
            selection = Selection.of(model, optimizer)
            assert torch.equal(selection["table"], kept)
            both = Selection({**selection, "fc.weight": torch.tensor([T, N, T])})
            with both.applied(model), both.applied(alone):
                torch.testing.assert_close(model(x), alone(x))
                assert not torch.allclose(model(x), dense)
            torch.testing.assert_close(model(x), dense)
        with pytest.raises(ValueError, match=r"apply: table is sharded over ranks.*sel\.applied\(model\)"):
            selection.apply(model)
    finally:
        dist.destroy_process_group()


# -- by hand -----------------------------------------------------------------------------------------------------


def test_what_a_selection_says() -> None:
    mixed = Selection({"a": torch.tensor([T, N, N, N]), "b": torch.tensor([[T, T, N], [T, T, T]])})
    assert mixed.keep == 0.6  # 6 of 10
    assert mixed.per_layer() == {"a": 0.25, "b": 5 / 6}
    assert (list(mixed), len(mixed), "b" in mixed, mixed.level, mixed.source) == (["a", "b"], 2, True, "filter", {})
    assert Selection({"b": mixed["b"]}).level == "weight"
    assert Selection({"a": torch.tensor(T), "b": torch.tensor([N])}).level == "layer"
    assert Selection({"a": torch.tensor([T, N])}, level="layer").level == "layer"
    assert Selection({}).keep == 1
    assert repr(mixed) == "Selection(level='filter', 2 tensors, keep=0.6)"
    assert mixed != Selection(mixed)


def test_masks_of_one_entry_of_vectors_and_of_tensors_without_a_module() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model.register_parameter("table", nn.Parameter(torch.ones(3, 2)))
    model.register_parameter("gain", nn.Parameter(torch.ones(())))
    masks = Selection({
        "0.weight": torch.tensor([N]), "2.bias": torch.tensor([T, N]), "table": torch.tensor([T, N, N]),
        "gain": torch.tensor([N]),
    }).masks(model)  # fmt: skip
    assert {name: mask.tolist() for name, mask in masks.items()} == {
        "0.weight": [[N, N, N], [N, N, N]],
        "0.bias": [N, N],
        "1.weight": [N, N],
        "1.bias": [N, N],
        "2.bias": [T, N],
        "table": [[T, T], [N, N], [N, N]],
        "gain": N,
    }


def test_decisions_about_one_parameter_are_joined() -> None:
    """A bias masked by its filter and by itself; a tensor that two modules share."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 3, bias=False))
    model[1].weight = model[0].weight
    masks = Selection({
        "0.weight": torch.tensor([T, T, N]), "0.bias": torch.tensor([T, N, T]), "1.weight": torch.tensor([N, T, T])
    }).masks(model)  # fmt: skip
    assert masks.keys() == {"0.weight", "0.bias"}
    assert masks["0.weight"].tolist() == [[N, N], [T, T], [N, N]]
    assert masks["0.bias"].tolist() == [N, N, N]


def test_bad_selections() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3))
    with pytest.raises(ValueError, match=r"'1\.wait', which is no parameter of the model; it has 0\.weight, 0\.bias"):
        Selection({"1.wait": torch.tensor([T])}).masks(model)
    with pytest.raises(ValueError, match=r"0\.weight has shape \(2,\), expected is \(3, 2, 1, 1\) or \(3,\)"):
        Selection({"0.weight": torch.tensor([T, N])}).apply(model)
    with pytest.raises(ValueError, match=r"1\.weight has shape \(2,\), expected is \(3,\)$"):
        Selection({"1.weight": torch.tensor([T, N])}).applied(model).__enter__()
    with pytest.raises(ValueError, match=r"\(2, 2\), expected is"):
        Selection({"0.weight": torch.ones(2, 2) > 0}).masks(model)
    with pytest.raises(TypeError, match=r"mask of a must be a bool tensor, got torch.float32: write `mask != 0`"):
        Selection({"a": torch.ones(3)})
    with pytest.raises(TypeError, match="list"):
        Selection({"a": [True]})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="named"):
        Selection({3: torch.tensor([T])})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="level must be one of weight, filter, layer or None, got 'row'"):
        Selection({}, level="row")
    with pytest.raises(TypeError, match="source"):
        Selection({}, source={"at": object()})
    with pytest.raises(ValueError, match="not a parameter of the model"):
        Selection.of(nn.Linear(2, 2), DessiLBI(nn.Linear(2, 2).parameters(), 0.1))


# -- for good ----------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda params: torch.optim.Adam(params, 0.01),
    "adamw fused": lambda params: torch.optim.AdamW(params, 0.01, fused=True),
    "dessilbi": lambda params: DessiLBI(params, 0.1, nu=5.0, lam=0.02, momentum=0.9),
    "dessiadamw": lambda params: DessiAdamW(params, 0.01, lam=0.02),
}


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))


SELECTION = Selection({"0.weight": torch.tensor([T, N, T, N]), "4.weight": torch.arange(720).view(5, 144) % 3 > 0})


def steps(model: nn.Module, optimizers: list[torch.optim.Optimizer], count: int = 1, after=lambda: None) -> None:
    torch.manual_seed(2)
    for _ in range(count):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x, y = torch.randn(8, 1, 8, 8), torch.randint(0, 5, (8,))
        F.cross_entropy(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
        after()


def zero_by_hand(model: nn.Sequential) -> None:
    with torch.no_grad():
        for p in (model[0].weight, model[0].bias, model[1].weight, model[1].bias):
            p[[1, 3]] = 0
        model[4].weight.view(-1)[::3] = 0


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("order", ["optimizer first", "selection first"])
def test_what_is_out_stays_zero_whatever_the_momentum(kind: str, order: str) -> None:
    """Momentum from before the selection goes on pushing; all other weights move as in a loop that zeroes by hand."""
    model, reference = network(), network()
    by_hand = OPTIMIZERS[kind](reference.parameters())
    addresses = [(id(p), p.data_ptr()) for p in model.parameters()]
    if order == "optimizer first":
        optimizer = OPTIMIZERS[kind](model.parameters())
        steps(model, [optimizer], 3)
        steps(reference, [by_hand], 3)
        SELECTION.apply(model)
    else:
        SELECTION.apply(model)
        optimizer = OPTIMIZERS[kind](model.parameters())
    zero_by_hand(reference)
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(a, b)
    seen = []
    steps(model, [optimizer], 5, lambda: seen.append([bool(p[[1, 3]].any()) for p in list(model.parameters())[:4]]))
    steps(reference, [by_hand], 5, lambda: zero_by_hand(reference))
    assert seen == 5 * [4 * [False]]
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    moving = [v for key, v in optimizer.state[model[4].weight].items() if key in ("momentum_buffer", "exp_avg")]
    assert moving[0].view(-1)[::3].any()
    assert [(id(p), p.data_ptr()) for p in model.parameters()] == addresses


def test_several_optimizers_and_groups_added_later() -> None:
    model = network()
    first, second = torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.Adam(model[4].parameters(), 0.1)
    other = nn.Linear(2, 2)
    apart = torch.optim.SGD(other.parameters(), 0.1)
    handle = SELECTION.apply(model)
    steps(model, [first, second], 2)
    first.add_param_group({"params": list(model[1].parameters())})
    steps(model, [first, second], 2)
    assert {name for name, p in model.named_parameters() if (p == 0).any()} == SELECTION.masks(model).keys()
    assert (model[1].bias == 0).tolist() == [N, T, N, T]
    before = other.weight.detach().clone()
    other(torch.ones(1, 2)).sum().backward()
    apart.step()
    torch.testing.assert_close(other.weight, before - 0.1)
    handle.remove()


def test_remove_ends_it_and_so_does_the_with() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    steps(model, [optimizer])
    handle = SELECTION.apply(model)
    steps(model, [optimizer])
    assert not model[4].weight.view(-1)[::3].any()
    handle.remove()
    steps(model, [optimizer])
    assert model[4].weight.view(-1)[::3].all()
    with SELECTION.apply(model):
        steps(model, [optimizer])
        assert not model[4].weight.view(-1)[::3].any()
    assert not model[4].weight.view(-1)[::3].any()  # not restored: that is what `applied` is for
    steps(model, [optimizer])
    assert model[4].weight.view(-1)[::3].all()


def test_masks_in_force_change_in_place() -> None:
    model, reference = network(), network()
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, reference)]
    handle = SELECTION.apply(model)
    steps(model, optimizers[:1])
    held = [mask.data_ptr() for mask in handle._masks.values()]
    weight, place = model[4].weight, torch.arange(720).view(5, 144) % 3
    handle.change([(weight, place != 1)])
    assert torch.equal(weight != 0, place == 2)  # what was out is zero until it has moved
    steps(model, optimizers[:1], 2)
    assert not weight[place == 1].any()
    assert weight.view(5, 4, 36)[:, ::2][place.view(5, 4, 36)[:, ::2] == 0].all()  # what living filters feed
    assert [mask.data_ptr() for mask in handle._masks.values()] == held
    with pytest.raises(ValueError, match=r"shape \(5,\) has no mask"):
        handle.change([(model[4].bias, torch.ones(5, dtype=torch.bool))])
    handle.remove()

    def other_weights() -> None:
        now = reference[4].weight.detach().clone()
        zero_by_hand(reference)
        reference[4].weight.data.copy_(now * (place != 1))

    zero_by_hand(reference)
    steps(reference, optimizers[1:], after=lambda: zero_by_hand(reference))
    other_weights()
    steps(reference, optimizers[1:], 2, after=other_weights)
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_two_selections_compose() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    steps(model, [optimizer])
    one = SELECTION.apply(model)
    other = Selection({"0.weight": torch.tensor([N, T, T, T])}).apply(model)
    steps(model, [optimizer], 2)
    assert (model[0].bias == 0).tolist() == [T, T, N, T]
    one.remove()
    steps(model, [optimizer], 2)
    assert (model[0].bias == 0).tolist() == [T, N, N, N]
    other.remove()


def test_a_model_that_is_dropped_is_not_kept_alive() -> None:
    gc.collect()  # the models of other tests
    before = len(_global_optimizer_post_hooks)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    handle = SELECTION.apply(model)
    steps(model, [optimizer])
    weight = weakref.ref(model[4].weight)
    assert len(_global_optimizer_post_hooks) == before + 1
    del model, optimizer
    gc.collect()
    assert weight() is None
    assert len(_global_optimizer_post_hooks) == before
    handle.remove()


def test_a_model_moved_after_apply() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with SELECTION.apply(model):
        steps(model, [optimizer])
        model.to(torch.float64)
        optimizer.state.clear()
        model[4].weight.grad = torch.ones_like(model[4].weight)
        optimizer.step()
        assert not model[4].weight.view(-1)[::3].any()


def test_a_skipped_step_of_the_scaler_and_a_closure() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with SELECTION.apply(model):
        for k in range(3):
            loss = model(torch.randn(4, 1, 8, 8)).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss * (float("inf") if k == 1 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
            assert not model[4].weight.view(-1)[::3].any()

        def closure():
            optimizer.zero_grad()
            loss = model(torch.randn(4, 1, 8, 8)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        assert not model[4].weight.view(-1)[::3].any()


@pytest.mark.gpu
def test_in_a_cuda_graph() -> None:
    model = network().cuda()
    reference = copy.deepcopy(model)
    x, y = torch.randn(8, 1, 8, 8, device="cuda"), torch.randint(0, 5, (8,), device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    by_hand = torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9)

    def step(model, optimizer):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    handle = SELECTION.apply(model)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(model, optimizer)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        step(model, optimizer)
    for _ in range(4):
        graph.replay()
    zero_by_hand(reference)
    for _ in range(7):
        step(reference, by_hand)
        zero_by_hand(reference)
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert not model[4].weight.view(-1)[::3].any()
    other = torch.arange(720, device="cuda").view(5, 144) % 3 != 1
    handle.change([(model[4].weight, other)])  # the graph has the memory of the masks, not the masks
    for _ in range(3):
        graph.replay()
    assert not model[4].weight[~other].any()
    assert model[4].weight.view(-1)[::3].any()
    handle.remove()


@pytest.mark.gpu
def test_a_step_does_not_wait_for_the_device() -> None:
    model = network().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with SELECTION.apply(model):
        for k in range(3):
            model(torch.randn(8, 1, 8, 8, device="cuda")).sum().backward()
            torch.cuda.set_sync_debug_mode("error" if k else "default")
            try:
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")


# -- files -------------------------------------------------------------------------------------------------------


def test_round_trip(tmp_path) -> None:
    masks = {
        "a": torch.arange(13) % 3 == 0, "b": torch.rand(3, 5, 7) > 0.5, "c": torch.tensor(N), "d": torch.ones(0) > 0,
        "e": torch.tensor([T]),
    }  # fmt: skip
    selection = Selection(masks, level="filter", source={"at": 3, "time": 0.5})
    selection.save(tmp_path / "s")
    loaded = Selection.load(tmp_path / "s")
    assert list(loaded) == list(masks)
    assert all(torch.equal(loaded[name], mask) for name, mask in masks.items())
    assert (loaded.level, loaded.source) == ("filter", {"at": 3, "time": 0.5})
    big = Selection({"w": torch.rand(1000, 1000) > 0.9})
    big.save(tmp_path / "s")
    assert (tmp_path / "s").stat().st_size < 1_000_000 / 8 + 1000


def test_bad_files_say_so_in_one_line(tmp_path) -> None:
    file = tmp_path / "a.sel"
    SELECTION.save(file)
    whole = file.read_bytes()
    tensors = [{"name": "a", "shape": [3, 3]}]
    header = {"level": "weight", "source": {}, "tensors": tensors}
    packed = {"0": torch.zeros(2, dtype=torch.uint8).numpy()}
    damaged = [
        ({}, header),
        ({"0": packed["0"][:1]}, header),
        ({"0": packed["0"].astype("int64")}, header),
        (packed, {**header, "level": "rows"}),
        (packed, {**header, "tensors": [{"name": "a", "shape": [-3, -3]}]}),
        (packed, {**header, "tensors": [{"name": 3, "shape": [3, 3]}]}),
        ({**packed, "1": packed["0"]}, {**header, "tensors": tensors * 2}),
        (packed, {"level": "weight"}),
        (packed, {**header, "tensors": 7}),
    ]
    for arrays, described in damaged:
        save_arrays(file, "selection", 1, arrays, described)
        with pytest.raises(ValueError, match=r"a\.sel: damaged selection file") as error:
            Selection.load(file)
        assert "\n" not in str(error.value)
    cases = {
        "truncated": (whole[:-8], "truncated"),
        "empty": (b"", "truncated"),
        "newer": (whole.replace(b'\\"version\\": 1', b'\\"version\\": 9'), "9 is newer"),
        "foreign": (whole.replace(b'\\"kind\\": \\"selection\\"', b'\\"kind\\": \\"sElection\\"'), "not a dessilbi"),
    }
    for data, message in cases.values():
        assert data != whole
        file.write_bytes(data)
        with pytest.raises(ValueError, match=f"a.sel.*{message}") as error:
            Selection.load(file)
        assert "\n" not in str(error.value)
    with pytest.raises(FileNotFoundError):
        Selection.load(tmp_path / "nowhere")


# -- off a path --------------------------------------------------------------------------------------------------


def recorded(model: nn.Module, groups: list[dict], points: list[dict[str, torch.Tensor]]) -> Path:
    """A path whose ‖V‖ at every point is written down by hand; the threshold is 1."""
    optimizer = DessiLBI(groups, lr=0.1, lam=1.0)
    named = dict(model.named_parameters())
    path = Path(model, optimizer)
    for k, point in enumerate(points):
        for name, v in point.items():
            optimizer.state[named[name]]["dual"] = v.clone().view_as(named[name])
        path.record(k + 1)
    return path


def filters(*norms: float, size: int = 1) -> torch.Tensor:
    """Filters of these norms, each in the filter's first element."""
    return F.pad(torch.tensor(norms).view(-1, 1), (0, size - 1))


def filter_path() -> Path:
    model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.Conv2d(4, 3, 1))
    return recorded(model, param_groups(model), [
        {"0.weight": filters(2.0, 0, 0.5, 0), "1.weight": filters(0, 0.9, 0, size=4)},
        {"0.weight": filters(3.0, 0.2, 1.5, 0.6), "1.weight": filters(0, 0.9, 4.0, size=4)},
        {"0.weight": filters(3.0, 0.3, 0.4, 0.7), "1.weight": filters(0, 0.9, 4.0, size=4)},
    ])  # fmt: skip


# By hand: a0 entered first, then b2 (4.0) and a2 (0.4 now, it has left again), then 0.9, 0.7, 0.3, 0.
ORDER = ["a0", "b2", "a2", "b1", "a3", "a1", "b0"]


def kept(selection: Selection) -> set[str]:
    layers = zip("abcdefg", selection.values(), strict=False)
    return {f"{letter}{int(i)}" for letter, mask in layers for i in mask.flatten().nonzero()}


def test_the_support_at_a_point() -> None:
    path = filter_path()
    assert kept(select(path)) == {"a0", "b2"}
    assert kept(select(path, at=1)) == {"a0", "a2", "b2"}
    assert kept(select(path, at=0, min_keep=0)) == {"a0"}
    last = select(path)
    assert (last.level, last.source["at"], last.source["point"]) == ("filter", 2, 3.0)
    assert list(last) == path.names


def test_the_bounds_top_up_the_support() -> None:
    path = filter_path()
    assert kept(select(path, at=0)) == {"a0", "b1"}  # b is empty, 0.9 is its best
    assert kept(select(path, max_prune=0.5)) == {"a0", "a2", "b2", "b1"}  # 2 of 4 and 2 (1.5) of 3
    assert kept(select(path, min_keep=3)) == {"a0", "a2", "a3", "b0", "b1", "b2"}
    assert kept(select(path, min_keep=9)) == set(ORDER)
    assert kept(select(path, max_prune=0)) == set(ORDER)


def test_a_fraction_of_the_ranking() -> None:
    path = filter_path()
    for k in range(8):
        chosen = select(path, keep=k / 7, min_keep=0)
        assert kept(chosen) == set(ORDER[:k])
        assert chosen.keep == pytest.approx(k / 7)
    assert kept(select(path, keep=0.999)) == set(ORDER[:6])
    with pytest.raises(ValueError, match=r"keep=0\.2 cannot be reached: with min_keep=1 the least is 0\.285714"):
        select(path, keep=0.2)
    with pytest.raises(ValueError, match=r"min_keep=1 and max_prune=0.5 the least is 0\.571428"):
        select(path, keep=3 / 7, max_prune=0.5)
    assert kept(select(path, keep=4 / 7, max_prune=0.5)) == {"a0", "a2", "b1", "b2"}
    assert kept(select(path, keep=5 / 7, max_prune=0.5)) == {"a0", "a2", "b1", "b2", "a3"}
    # a needs 3, whose last comes after b1; one more may be taken: b1.
    assert kept(select(path, keep=6 / 7, max_prune=0.25, min_keep=0)) == {"a0", "a2", "a3", "b1", "b2", "b0"}


def test_a_target_may_look_at_the_beginning_only() -> None:
    path = filter_path()
    assert kept(select(path, at=0, keep=2 / 7, min_keep=0)) == {"a0", "b1"}
    assert kept(select(path, at=0, keep=3 / 7, min_keep=0)) == {"a0", "b1", "a2"}
    assert kept(select(path, at=0, keep=5 / 7, min_keep=0)) == {"a0", "b1", "a2", "a1", "a3"}  # zeros, as they come
    assert kept(select(path, at=1, keep=3 / 7)) == {"a0", "b2", "a2"}


class Prices:
    """A filter of the first layer costs 10, one of the second 100; a MAC is a tenth of that, a second a thousandth."""

    def __init__(self) -> None:
        self.asked = 0

    def parameters_of(self, sel: Selection) -> int:
        self.asked += 1
        a, b = (int(mask.sum()) for mask in sel.values())
        return 10 * a + 100 * b

    def macs_of(self, sel: Selection) -> int:
        return self.parameters_of(sel) // 10

    def latency_of(self, sel: Selection) -> float:
        return self.parameters_of(sel) / 1000


@pytest.mark.parametrize(
    ("budget", "count"),
    [(9, 0), (10, 1), (109, 1), (110, 2), (119, 2), (120, 3), (225, 4), (239, 5), (339, 6), (340, 7), (1e9, 7)],
)
def test_budgets(budget: float, count: int) -> None:
    path, cost = filter_path(), Prices()
    expected = set(ORDER[:count])
    assert kept(select(path, params=budget, min_keep=0, cost=cost)) == expected
    assert cost.asked <= 2 + 3  # the ends, and three to halve seven
    assert kept(select(path, macs=budget / 10, min_keep=0, cost=cost)) == expected
    assert kept(select(path, latency=budget / 1000 + 1e-9, min_keep=0, cost=cost)) == expected


def test_budgets_that_bounds_make_unreachable() -> None:
    path, cost = filter_path(), Prices()
    assert kept(select(path, params=110, cost=cost)) == {"a0", "b2"}
    with pytest.raises(ValueError, match="params=109 cannot be reached: with min_keep=1 the least is 110"):
        select(path, params=109, cost=cost)
    with pytest.raises(ValueError, match=r"latency=0.1 cannot .* max_prune=0.5 the least is 0.22"):
        select(path, latency=0.1, max_prune=0.5, cost=cost)
    with pytest.raises(ValueError, match=r"macs=3 needs something that counts: pass cost=profile\(model, example"):
        select(path, macs=3)


def weight_path(tmp_path=None) -> Path:
    """Rows of a linear layer and the output channels of a transposed convolution, weight by weight."""
    model = nn.Sequential(nn.Linear(2, 3), nn.ConvTranspose1d(3, 2, 1))
    path = recorded(model, param_groups(model, conv="weight"), [
        {"0.weight": torch.tensor([0.5, 0, 0, 2, 0, 0]), "1.weight": torch.tensor([0.1, 0, 0.9, 0, 0.2, 0])},
        {"0.weight": torch.tensor([0.5, 0, 0.7, 3, 0, 0]), "1.weight": torch.tensor([1.1, 0, 0.9, 0.3, 0.2, 0])},
    ])  # fmt: skip
    if tmp_path is None:
        return path
    path.save(tmp_path / "p")
    return Path.load(tmp_path / "p")


@pytest.mark.parametrize("through_file", [False, True])
def test_weights(tmp_path, through_file: bool) -> None:
    path = weight_path(tmp_path if through_file else None)
    order = ["a3", "b0", "b2", "a2", "a0", "b3", "b4", "a1", "a4", "a5", "b1", "b5"]
    for k in range(13):
        assert kept(select(path, keep=k / 12, min_keep=0)) == set(order[:k])
    assert select(path).level == select(path, level="weight").level == "weight"
    assert select(path)["0.weight"].tolist() == [[N, N], [N, T], [N, N]]
    # b's bound takes b0; b2, b3 and b4 are as far as it must go with four of six.
    assert kept(select(path, max_prune=1 / 3)) == {"a3", "a2", "a0", "a1", "b0", "b2", "b3", "b4"}


@pytest.mark.parametrize("through_file", [False, True])
def test_filters_from_weights(tmp_path, through_file: bool) -> None:
    """Of the transposed convolution's (3, 2, 1) elements channel 0 has 0, 2 and 4, channel 1 has 1, 3 and 5."""
    path = weight_path(tmp_path if through_file else None)
    assert select(path, level="filter").level == "filter"
    assert kept(select(path, level="filter")) == {"a1", "b0"}
    assert select(path, at=0, level="filter")["1.weight"].tolist() == [T, N]  # empty there; topped up with (0.1…0.9)
    assert kept(select(path, at=0, level="layer")) == {"a1"}
    order = ["a1", "b0", "a0", "b1", "a2"]  # entries 0 and 1; then 0.5 and 0.3
    for k in range(2, 6):
        assert kept(select(path, keep=k / 5, level="filter")) == set(order[:k])
    assert kept(select(path, keep=1 / 5, level="layer")) == {"a1"}
    assert select(path, keep=1 / 5, level="layer").level == "layer"
    with pytest.raises(ValueError, match="keep"):
        select(path, keep=1 / 5, level="filter")


def test_a_filter_outweighs_single_weights() -> None:
    """(0.6, 0.6) has the norm 0.85 and comes before (0.8, 0)."""
    model = nn.Sequential(nn.Linear(2, 2))
    path = recorded(model, param_groups(model), [{"0.weight": torch.tensor([0.8, 0, 0.6, 0.6])}])
    assert kept(select(path, keep=0.25)) == {"a0"}
    assert kept(select(path, keep=0.5, level="filter")) == {"a1"}


def test_layers() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Conv2d(2, 2, 1))
    path = recorded(model, param_groups(model, conv="layer"), [{"0.weight": torch.tensor([2.0, 2.0])}])
    selection = select(path)
    assert selection.level == "layer"
    assert [mask.tolist() for mask in selection.values()] == [[T], [N]]
    assert not selection.masks(model)["1.bias"].any()
    assert select(path, max_prune=0.5).keep == 1  # half of a layer is all of it


def test_columns_and_other_groups(tmp_path) -> None:
    """Also of grouped and transposed convolutions, where only the path knows how they lie."""
    model = nn.Sequential(nn.Linear(3, 2), nn.ConvTranspose1d(3, 2, 1), nn.Conv1d(4, 2, 1, groups=2), nn.Linear(2, 2))
    groups = param_groups(nn.Sequential(*model[:3]), conv="input", linear="input")[:-1]
    groups.append({"params": [("3.weight", model[3].weight)], "group": Slices((0, 1))})
    path = recorded(model, groups, [{
        "0.weight": torch.tensor([[2.0, 0, 0], [0, 0, 2]]),
        "1.weight": torch.tensor([[2.0, 0], [0, 0], [0, 0]]),
        "2.weight": torch.tensor([[2.0, 0], [2, 0]]),  # inputs 0 and 1 feed output 0, 2 and 3 output 1
        "3.weight": torch.tensor([[0, 0], [2.0, 0]]),
    }])  # fmt: skip
    path.save(tmp_path / "p")
    for one in (path, Path.load(tmp_path / "p")):
        selection = select(one)
        assert selection["0.weight"].tolist() == [[T, N, T], [T, N, T]]
        assert selection["1.weight"].squeeze(-1).tolist() == [[T, T], [N, N], [N, N]]
        assert selection["2.weight"].squeeze(-1).tolist() == [[T, N], [T, N]]
        assert selection["3.weight"].tolist() == [[N, N], [T, N]]
        assert all(torch.equal(mask, Selection.of(model, path._optimizer)[name]) for name, mask in selection.items())
    own = recorded(model, [{"params": [model[0].weight], "group": Labels(torch.zeros(2, 3, dtype=torch.int))}], [{}])
    with pytest.raises(ValueError, match=r"0\.weight is recorded by .*'labels'.*take Selection\.of\(model, optimizer"):
        select(own)


def test_transposed_filters_are_filters() -> None:
    model = nn.Sequential(nn.ConvTranspose1d(4, 4, 1, groups=2))
    path = recorded(model, param_groups(model), [{"0.weight": torch.tensor([[0, 2.0], [0, 0], [0, 0], [2, 0]])}])
    assert select(path)["0.weight"].tolist() == [N, T, T, N]
    assert not select(path).masks(model)["0.weight"].squeeze()[[0, 3], [0, 1]].any()
    # Without param_groups, group "filter" means the first axis: the inputs of a transposed convolution.
    path = recorded(model, [{"params": [model[0].weight]}], [{"0.weight": torch.tensor([[2.0, 0]] + [[0, 0]] * 3)}])
    assert select(path)["0.weight"].squeeze().tolist() == [[T, T], [N, N], [N, N], [N, N]]


def test_coupled_channels_go_together() -> None:
    model = nn.Sequential(nn.Conv1d(1, 3, 1), nn.ConvTranspose1d(3, 3, 1))
    first, second = (model[0].weight, model[1].weight)
    joint = torch.arange(3)
    parts = channels([(first.shape, None, joint), (second.shape, transposed_filters(), joint)])
    groups = [{"params": [first, second], "group": parts}]
    v = torch.tensor([0.2, 0.8, 0.1])
    path = recorded(model, groups, [{"0.weight": filters(0.1, 0.8, 0.3), "1.weight": torch.diag(v)}])
    assert path.entry("0.weight").tolist() == path.entry("1.weight").tolist() == [NEVER, 0, NEVER]
    assert [mask.tolist() for mask in select(path).values()] == [[N, T, N], [N, T, N]]
    assert [mask.tolist() for mask in select(path, keep=4 / 6).values()] == [[N, T, T], [N, T, T]]
    assert {k: v.tolist() for k, v in Selection.of(model, path._optimizer).items()} == {
        "0.weight": [N, T, N],
        "1.weight": [N, T, N],
    }


@pytest.mark.parametrize("bounds", [{"min_keep": 0}, {}, {"min_keep": 2, "max_prune": 0.7}])
def test_any_run_against_a_plain_sort(bounds: dict) -> None:
    """Conv by filters, linear by weights; 5 points at which the support comes and goes."""
    model = nn.Sequential(nn.Conv2d(1, 7, 3), nn.Linear(9, 5), nn.Linear(5, 3))
    names = [f"{i}.weight" for i in range(3)]
    sized = {name: p.shape for name, p in model.named_parameters()}
    path = recorded(model, param_groups(model), [{n: torch.randn(sized[n]) * k / 5 for n in names} for k in range(6)])
    groups = []
    for name in names:
        entry, size = path.entry(name).flatten().tolist(), path.magnitude(name).flatten().tolist()
        for e, v in zip(entry, size, strict=True):
            groups.append((e if e != NEVER else 99, -v, len(groups), name))
    ranked = sorted(groups)
    floors = {n: sum(g[3] == n for g in groups) for n in names}
    floors = {
        n: max(bounds.get("min_keep", 1), -int(-(1 - bounds.get("max_prune", 1)) * count // 1))
        for n, count in floors.items()
    }
    demanded = [g for n in names for g in [g for g in ranked if g[3] == n][: floors[n]]]
    others = [g for g in ranked if g not in demanded]
    for count in range(len(demanded), len(groups) + 1):
        expected = sorted(g[2] for g in demanded + others[: count - len(demanded)])
        chosen = torch.cat([mask.flatten() for mask in select(path, keep=count / len(groups), **bounds).values()])
        assert chosen.nonzero().flatten().tolist() == expected


def test_a_file_of_the_first_version(tmp_path) -> None:
    """It has no magnitudes of weights: what entered together stays in the order it has in the tensor."""
    path, new = weight_path(), tmp_path / "new"
    path.save(new)
    arrays, header = load_arrays(new, "path", 2)
    tensors = [{k: t[k] for k in ("name", "kind", "shape", "groups")} for t in header["tensors"]]
    arrays = {name: a for name, a in arrays.items() if not name.endswith("codes")}
    save_arrays(tmp_path / "old", "path", 1, arrays, {"points": header["points"], "tensors": tensors})
    old = Path.load(tmp_path / "old")
    assert kept(select(old)) == {"a3", "b0"}
    assert kept(select(old, keep=4 / 12, min_keep=0)) == {"a3", "b0", "a0", "a1"}


def test_bad_requests() -> None:
    path = filter_path()
    for wrong, message in [
        ({"keep": 0.5, "params": 3}, "keep and params are 2 targets: give one"),
        ({"keep": 1.5}, "keep must be a fraction from 0 to 1, got 1.5"),
        ({"keep": float("nan")}, "keep must be"),
        ({"max_prune": -0.1}, "max_prune must be a fraction"),
        ({"macs": -3}, "macs must be a number ≥ 0, got -3"),
        ({"min_keep": -1}, "min_keep must be a whole number ≥ 0, got -1"),
        ({"min_keep": 0.5}, "min_keep must be a whole number"),
        ({"level": "row"}, "level must be one of weight, filter, layer or None, got 'row'"),
        ({"level": "weight"}, "level='weight': 0.weight is recorded by groups of kind 'filter'"),
        ({"at": 3}, "at=3 is outside this path of 3 points"),
    ]:
        with pytest.raises(ValueError, match=message):
            select(path, **wrong)
    with pytest.raises(TypeError, match=r"keep must be a number, got '0\.5' \(str\)"):
        select(path, keep="0.5")  # type: ignore[arg-type]
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="0 points"):
        select(Path(model, DessiLBI(model.parameters(), 0.1)))
