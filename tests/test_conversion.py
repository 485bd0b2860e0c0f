import copy

import pytest
import torch
from torch import Tensor, nn

from dessilbi import conversion
from dessilbi.conversion import CSRLinear, load_csr, save_csr, to_csr, to_semi_structured
from dessilbi.models import create


def sparse_network() -> nn.Module:
    """Two layers with a tenth of their weights and a dense head."""
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64, bias=False), nn.ReLU(), nn.Linear(64, 5))
    for name in ("0", "2"):
        weight = network.get_submodule(name).weight
        weight.data.mul_(torch.rand_like(weight) < 0.1)
    return network


@pytest.mark.parametrize("shape", [(64,), (1, 64), (7, 64), (2, 3, 64), (0, 64)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_csr_layer_is_the_dense_one(shape, bias):
    linear = nn.Linear(64, 48, bias=bias)
    linear.weight.data.mul_(torch.rand_like(linear.weight) < 0.2)
    linear.weight.data[5] = 0  # an empty row
    made, x = CSRLinear.of(linear), torch.randn(shape)
    torch.testing.assert_close(made(x), linear(x))
    assert len(made.values) == int((linear.weight != 0).sum())


def test_the_whole_network(tmp_path):
    network = sparse_network()
    before, x = copy.deepcopy(network.state_dict()), torch.randn(9, 64)
    done = to_csr(network, x, max_density=0.3, force=True, rounds=2)
    assert done.converted == ("0", "2")
    assert [type(module) for module in done.model] == [CSRLinear, nn.ReLU, CSRLinear, nn.ReLU, nn.Linear]
    torch.testing.assert_close(done.model(x), network(x))
    assert [layer.density for layer in done.layers] == [
        int((before[f"{name}.weight"] != 0).sum()) / (64 * 128) for name in ("0", "2")
    ]
    assert all(s.seconds > 0 for layer in done.layers for s in (layer.speed, layer.control))
    assert done.speed.seconds > 0
    assert done.control.seconds > 0
    assert network.training
    assert type(network[0]) is nn.Linear
    assert all(torch.equal(before[name], t) for name, t in network.state_dict().items())
    # What comes back is an ordinary network: it copies, and gradients flow through it to its inputs' other users.
    copy.deepcopy(done.model)
    assert not any(t.is_inference() for t in done.model.state_dict().values())

    facts = save_csr(done.model, tmp_path / "net.safetensors")
    assert facts["bytes"] < sum(4 * p.numel() for p in network.parameters()) / 3
    read = load_csr(sparse_network(), tmp_path / "net.safetensors")
    torch.testing.assert_close(read(x), network(x))


def test_only_what_is_faster_is_converted(monkeypatch):
    seconds = {"dense": 2.0, "control": 2.0, "sparse": 1.0}

    def interleave(work, rounds, *, device):
        slow = work["dense"] is first or not isinstance(work["dense"], nn.Linear)
        return {name: [3.0 if slow and name == "sparse" else seconds[name]] * rounds for name in work}

    def partial(module, *args, **kwargs):
        return module

    monkeypatch.setattr(conversion, "interleave", interleave)
    monkeypatch.setattr(conversion, "partial", partial)
    monkeypatch.setattr(conversion, "_copy", lambda model: model)
    network = sparse_network().eval()
    first = network[0]
    done = to_csr(network, torch.randn(3, 64), max_density=0.3, rounds=3)
    assert done.converted == ("2",)
    assert {layer.name: layer.speed.ratio for layer in done.layers} == {"0": pytest.approx(2 / 3), "2": 2.0}
    assert done.speed.ratio == pytest.approx(2 / 3)
    assert done.control.ratio == 1


def test_large_and_very_sparse_is_faster():
    network = nn.Sequential(nn.Linear(2048, 2048))
    network[0].weight.data.mul_(torch.rand_like(network[0].weight) < 0.01)
    done = to_csr(network, torch.randn(16, 2048), max_density=0.02, rounds=5)
    assert done.converted == ("0",)  # about ten times as fast
    assert done.speed.ratio > 1.5


def test_a_selection_is_applied_to_the_copy():
    class Half:
        def masks(self, model: nn.Module) -> dict[str, Tensor]:
            return {"0.weight": torch.arange(64).expand(128, 64) < 16}

    network = sparse_network()
    network[0].weight.data.fill_(1.0)
    done = to_csr(network, torch.randn(2, 64), max_density=0.26, selection=Half(), force=True, rounds=1)
    assert {layer.name: layer.density for layer in done.layers}["0"] == 0.25
    assert bool((network[0].weight == 1).all())


def test_networks_that_are_not_sparse():
    with pytest.raises(ValueError, match=r"at most 0.5 .* sparsest, .* prune it first"):
        to_csr(create("lenet5"), torch.randn(1, 1, 28, 28))
    with pytest.raises(ValueError, match="no linear layers"):
        to_csr(nn.Sequential(nn.Conv2d(1, 1, 1)), torch.randn(1, 1, 4, 4))
    with pytest.raises(ValueError, match="max_density = 5"):
        to_csr(sparse_network(), torch.randn(1, 64), max_density=5)


def test_a_layer_that_is_not_called():
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)
            self.idle.weight.data.zero_()

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    with pytest.raises(ValueError, match="'idle' is not called"):
        to_csr(Idle(), torch.randn(1, 4))


def test_files_of_something_else(tmp_path):
    from dessilbi.export import to_safetensors

    to_safetensors(sparse_network(), tmp_path / "dense.safetensors")
    with pytest.raises(ValueError, match="holds no CSR layers"):
        load_csr(sparse_network(), tmp_path / "dense.safetensors")
    done = to_csr(sparse_network(), torch.randn(2, 64), max_density=0.3, force=True, rounds=1)
    save_csr(done.model, tmp_path / "csr.safetensors")
    larger = nn.Sequential(*sparse_network(), nn.Linear(5, 5))
    with pytest.raises(ValueError, match=r"'5.bias' is only in the model"):
        load_csr(larger, tmp_path / "csr.safetensors")


@pytest.mark.parametrize(
    ("rows", "expected"),
    [([[1, 1, 0, 0]], True), ([[1, 0, 0, 1], [0, 0, 0, 0]], True), ([[1, 1, 1, 0]], False), ([[0, 0, 0]], False)],
)
def test_two_of_four(rows, expected):
    assert conversion.is_2_4(torch.tensor(rows, dtype=torch.float32)) is expected


def test_2_4_needs_a_gpu():
    with pytest.raises(ValueError, match="the model is on cpu"):
        to_semi_structured(sparse_network(), torch.randn(1, 64))


def two_of_four(network: nn.Module) -> nn.Module:
    for module in network.modules():
        if isinstance(module, nn.Linear):
            groups = module.weight.data.view(-1, 4)
            groups.scatter_(1, groups.abs().topk(2, dim=1, largest=False).indices, 0)
    return network


@pytest.mark.gpu
def test_2_4_is_the_dense_network():
    network = nn.Sequential(nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 2048)).to("cuda", torch.float16)
    two_of_four(network)
    x = torch.randn(1024, 2048, device="cuda", dtype=torch.float16)
    done = to_semi_structured(network, x, force=True, rounds=5)
    assert done.converted == ("0", "2")
    torch.testing.assert_close(done.model(x), network(x), rtol=2e-2, atol=2e-2)
    assert type(network[0].weight) is nn.Parameter
    print([(layer.name, layer.speed.ratio, layer.control.ratio) for layer in done.layers], done.speed, done.control)


@pytest.mark.gpu
def test_2_4_of_dense_weights_is_refused():
    network = nn.Sequential(nn.Linear(128, 128)).to("cuda", torch.float16)
    with pytest.raises(ValueError, match="'0' is not, nor is any other"):
        to_semi_structured(network, torch.randn(64, 128, device="cuda", dtype=torch.float16))
    odd = two_of_four(nn.Sequential(nn.Linear(12, 7))).to("cuda", torch.float16)
    with pytest.raises(ValueError, match=r"float16 weight of shape \(7, 12\) cannot be 2:4"):
        to_semi_structured(odd, torch.randn(64, 12, device="cuda", dtype=torch.float16))
