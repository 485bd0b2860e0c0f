"""Every kernel against the equations of `iteration.py`, evaluated in float64: 1e-6 after 100 steps, all variants."""

import itertools

import pytest
import torch
from torch import nn

import dessilbi.optim
from dessilbi import DessiLBI, iteration
from dessilbi.groups import partition

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 100
COUPLING = {"lr": 0.02, "kappa": 1.5, "nu": 3.0, "lam": 0.0613}
# Shapes that meet every tile: short and long rows, more than a chunk, more rows than a tile, sizes that do not divide.
SHAPES = {
    "weight": [(7, 5), (17, 13), (3, 4, 2, 2)],
    "filter": [(5, 3, 3, 3), (40, 2, 2, 2), (9, 100), (3, 20, 5, 5), (2, 2100)],
}
VARIANTS = {
    "naive": {},
    "momentum": {"momentum": 0.9},
    "dampened": {"momentum": 0.8, "dampening": 0.3},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "decay": {"momentum": 0.9, "weight_decay": 0.05},
    "decoupled": {"momentum": 0.9, "weight_decay": 0.01, "decoupled_weight_decay": True},
    "naive decay": {"weight_decay": 0.05, "maximize": True},
}


class Reference:
    """One tensor moved by the pure functions."""

    def __init__(self, w, group, options, size_normalised=False):
        self.w, self.part = w.double().cpu(), partition(group, w.shape)
        self.v, self.u = torch.zeros_like(self.w), None
        self.size_normalised = size_normalised
        self.scale = self.part.norms(self.w) if options.get("scaling") else None
        self.o = {**COUPLING, **options}

    def step(self, g):
        o = self.o
        g = -g if o.get("maximize") else g
        coupling = {k: o[k] for k in ("lr", "kappa", "nu", "lam")}
        d, v, scale = iteration.couple(
            self.w, self.v, self.part, scale=self.scale, size_normalised=self.size_normalised, **coupling
        )
        base = {
            k: o[k] for k in ("momentum", "dampening", "nesterov", "weight_decay", "decoupled_weight_decay") if k in o
        }
        self.w, self.u = iteration.sgd(self.w, g + d, self.u, step=o["kappa"] * o["lr"], **base)
        self.v, self.scale = v, scale


def force(monkeypatch, kernel):
    """Make the optimizer use this kernel, on whatever device the test has."""
    if kernel == "foreach":
        from dessilbi.kernels import foreach as module
    elif kernel == "compiled":
        from dessilbi.kernels import compiled as module
    else:
        from dessilbi.kernels import triton as module

    def choose(bucket):
        if kernel == "triton":
            assert module.why_not(bucket) is None
        return module.sgd_step

    monkeypatch.setattr(dessilbi.optim, "sgd_kernel", choose)


def start(shapes, dtype=torch.float32):
    tensors = [torch.randn(s) for s in shapes]
    for t in tensors:
        t[0] = 0  # groups of norm zero
    return [t.to(dtype) for t in tensors]


def compare(actual, expected, tolerance=1e-6):
    assert actual.isfinite().all()
    error = (actual.double().cpu() - expected).norm() / expected.norm().clamp_min(1e-3)
    assert error <= tolerance


def follow(kernel, level, options, monkeypatch, *, steps=STEPS, tensors=False, size_normalised=False, layout=None):
    force(monkeypatch, kernel)
    # ρ counts weights above λ, and among thousands one comes so near that rounding decides: not in the scaled runs.
    shapes = SHAPES[level] + ([(33, 100)] if level == "weight" and not options.get("scaling") else [])
    values = start(shapes)
    params = [nn.Parameter((layout(w) if layout else w).clone().to(DEVICE)) for w in values]
    settings = {**COUPLING, **options}
    if tensors:
        settings |= {k: torch.tensor(settings[k], device=DEVICE, dtype=torch.float64) for k in ("lr", "lam")}
    groups = [{"params": params, "group": level, "size_normalised": size_normalised}]
    optimizer = DessiLBI(groups, **settings)
    references = [Reference(w, level, options, size_normalised) for w in values]
    for k in range(steps):
        if k == steps // 2:  # a schedule, and a threshold that moves
            optimizer.lam = 0.0817
            lr = optimizer.param_groups[0]["lr"]
            optimizer.param_groups[0]["lr"] = lr.fill_(0.013) if tensors else 0.013
            for r in references:
                r.o |= {"lam": 0.0817, "lr": 0.013}
        for p, r in zip(params, references, strict=True):
            # A gradient that both see, drawn anew: it pulls to a point that differs from group to group.
            target = torch.linspace(-1, 1, len(r.w)).view(-1, *[1] * (r.w.ndim - 1)).double()
            g = (r.w - target + 0.3 * torch.randn(r.w.shape, dtype=torch.double)).float()
            g = -g if options.get("maximize") else g
            p.grad = g.to(DEVICE)
            r.step(g.double())
        optimizer.step()
    on = 0
    for p, r in zip(params, references, strict=True):
        compare(p.detach(), r.w)
        compare(optimizer.dual(p), r.v)
        if r.u is not None:
            compare(optimizer.state[p]["momentum_buffer"], r.u)
        if r.scale is not None:
            compare(optimizer.scale(p), r.scale)
        expected = iteration.support(r.v, r.part, lam=0.0817, scale=r.scale, size_normalised=size_normalised)
        assert torch.equal(optimizer.support(p).cpu(), expected)
        on += int(expected.sum())
    assert on > 0


@pytest.mark.parametrize("scaling", [False, True], ids=["", "scaling"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("level", SHAPES)
@pytest.mark.parametrize("kernel", ["foreach", "triton"])
def test_variants(kernel, level, variant, scaling, monkeypatch):
    follow(kernel, level, {**VARIANTS[variant], "scaling": scaling}, monkeypatch)


@pytest.mark.parametrize("scaling", [False, True], ids=["", "scaling"])
@pytest.mark.parametrize("level", SHAPES)
@pytest.mark.parametrize("kernel", ["foreach", "triton"])
def test_tensor_lr_and_lam(kernel, level, scaling, monkeypatch):
    follow(kernel, level, {"momentum": 0.9, "weight_decay": 0.01, "scaling": scaling}, monkeypatch, tensors=True)


@pytest.mark.parametrize("scaling", [False, True], ids=["", "scaling"])
@pytest.mark.parametrize("kernel", ["foreach", "triton"])
def test_size_normalised(kernel, scaling, monkeypatch):
    monkeypatch.setitem(COUPLING, "lam", 0.0213)
    follow(kernel, "filter", {"momentum": 0.9, "scaling": scaling}, monkeypatch, size_normalised=True)


def channels_last(w):
    return w.to(memory_format=torch.channels_last) if w.ndim == 4 else w


@pytest.mark.parametrize("level", SHAPES)
@pytest.mark.parametrize("kernel", ["foreach", "triton"])
def test_channels_last_weights_with_contiguous_gradients(kernel, level, monkeypatch):
    follow(kernel, level, {"momentum": 0.9, "scaling": True}, monkeypatch, layout=channels_last)


@pytest.mark.compile
@pytest.mark.parametrize("scaling", [False, True], ids=["", "scaling"])
@pytest.mark.parametrize("level", SHAPES)
def test_compiled(level, scaling, monkeypatch):
    """All variants of SGD are one compiled function; with and without momentum are two."""
    for variant in ("momentum", "nesterov", "decay", "decoupled", "dampened", "naive decay"):
        follow("compiled", level, {**VARIANTS[variant], "scaling": scaling}, monkeypatch, tensors=variant == "decay")
    follow("compiled", level, {"momentum": 0.9, "scaling": scaling}, monkeypatch, layout=channels_last, steps=20)


@pytest.mark.compile
def test_compiled_takes_every_partition_and_compiles_once(monkeypatch):
    from torch._dynamo.utils import counters

    from tests.test_oracle import test_dessilbi
    from tests.toy import GROUPS

    force(monkeypatch, "compiled")
    for kind in ("transposed grouped", "input", "layer", "labels"):
        test_dessilbi(kind, "decay", False)
    assert set(GROUPS) >= {"input", "layer", "labels"}
    shapes = [(6, 5), (7, 9), (11, 3)]
    params = [nn.Parameter(torch.randn(s)) for s in shapes]
    optimizer = DessiLBI([{"params": params, "group": "neuron"}], 0.1, momentum=0.9)
    for k in range(6):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.param_groups[0]["lr"] = 0.1 / (k + 1)
        optimizer.lam = 0.1 * k
        optimizer.step()
        if k == 1:
            compiled_by_then = counters["stats"]["unique_graphs"]
    assert counters["stats"]["unique_graphs"] == compiled_by_then


@pytest.mark.parametrize("kernel", ["foreach", "triton"])
@pytest.mark.parametrize("level", SHAPES)
def test_bfloat16_weights(kernel, level, monkeypatch):
    """Against the reference with W rounded after each step: V and u in float32 agree, W to its last bit or so."""
    force(monkeypatch, kernel)
    values = start(SHAPES[level], torch.bfloat16)
    params = [nn.Parameter(w.clone().to(DEVICE)) for w in values]
    options = {"momentum": 0.9, "weight_decay": 0.01, "scaling": True}
    optimizer = DessiLBI([{"params": params, "group": level}], **COUPLING, **options)
    references = [Reference(w, level, options) for w in values]
    for _ in range(10):
        for p, r in zip(params, references, strict=True):
            g = torch.randn(p.shape).bfloat16()
            p.grad = g.to(DEVICE)
            # The coupling sees the rounded W; where rounding falls the other way by a hair, take what the kernel has.
            r.step(g.double())
        optimizer.step()
        for p, r in zip(params, references, strict=True):
            assert (p.detach().double().cpu() - r.w).abs().max() <= 2**-7 * r.w.abs().max()
            r.w = p.detach().double().cpu()
    for p, r in zip(params, references, strict=True):
        assert optimizer.dual(p).dtype == torch.float32
        compare(optimizer.dual(p), r.v, 1e-5)
        compare(optimizer.state[p]["momentum_buffer"], r.u, 1e-5)


def test_many_tensors_and_lam_of_each(monkeypatch):
    """A λ for every parameter reaches the right tensor in one launch."""
    force(monkeypatch, "triton")
    params = [nn.Parameter(torch.ones(6, 10 * (i + 1), device=DEVICE)) for i in range(5)]
    lam = torch.tensor([0.0, 1e9, 0.0, 1e9, 0.0], device=DEVICE)
    optimizer = DessiLBI([{"params": params, "group": "neuron"}], 1.0, nu=1.0, lam=lam)
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert [bool(optimizer.support(p).all()) for p in params] == [True, False, True, False, True]


def test_new_gradients_every_step(monkeypatch):
    """The table follows gradients that move in memory, and state that is replaced by load_state_dict."""
    force(monkeypatch, "triton")
    p, q = (nn.Parameter(torch.ones(4, 8, device=DEVICE)) for _ in range(2))
    a, b = DessiLBI([p], 0.1, momentum=0.9), DessiLBI([q], 0.1, momentum=0.9)
    kept = []
    for k in range(6):
        p.grad, q.grad = (torch.full((4, 8), float(k), device=DEVICE) for _ in range(2))
        kept.append(p.grad)
        a.step()
        b.step()
        if k == 2:
            b.load_state_dict(a.state_dict())
    assert torch.equal(p, q)
    expected = Reference(
        torch.ones(4, 8), "weight", {"momentum": 0.9, "lr": 0.1, "nu": 100.0, "lam": 1.0, "kappa": 1.0}
    )
    for k in range(6):
        expected.step(torch.full((4, 8), float(k)).double())
    compare(p.detach(), expected.w)


@pytest.mark.parametrize("level", SHAPES)
def test_memory_layout_changed_under_way(level, monkeypatch):
    """model.to(memory_format=channels_last) after some steps: state follows its parameter."""
    force(monkeypatch, "triton")
    options = {"momentum": 0.9, "scaling": True}
    w = torch.randn(4, 3, 2, 2)
    p = nn.Parameter(w.clone().to(DEVICE))
    optimizer, reference = (
        DessiLBI([{"params": [p], "group": level}], **COUPLING, **options),
        Reference(w, level, options),
    )
    for k in range(8):
        if k == 4:
            p.data = p.data.to(memory_format=torch.channels_last)
        g = torch.randn(p.shape)
        p.grad = g.to(DEVICE)
        optimizer.step()
        reference.step(g.double())
    assert not p.is_contiguous()
    compare(p.detach(), reference.w)
    compare(optimizer.dual(p), reference.v)


@pytest.mark.parametrize("level", SHAPES)
def test_options_changed_under_way(level, monkeypatch):
    """Scaling switched on, then λ made to follow the size of groups: the plan of before must not be used."""
    runs = []
    for kernel in ("foreach", "triton"):
        force(monkeypatch, kernel)
        torch.manual_seed(0)
        params = [nn.Parameter(w.to(DEVICE)) for w in start(SHAPES[level])]
        optimizer = DessiLBI([{"params": params, "group": level}], **COUPLING, momentum=0.9)
        for k in range(9):
            optimizer.param_groups[0] |= {"scaling": k >= 3, "size_normalised": k >= 6}
            for p in params:
                p.grad = torch.randn(p.shape).to(DEVICE)
            optimizer.step()
        runs.append([x for p in params for x in (p.detach().cpu(), optimizer.dual(p).cpu())])
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_what_triton_cannot_take_is_said():
    from dessilbi.kernels import triton
    from dessilbi.kernels.bucket import Bucket

    def why(p, group):
        return triton.why_not(Bucket({}, False, params=[p], partitions=[partition(group, p.shape)]))

    p = torch.zeros(4, 4, device=DEVICE)
    assert why(p, "weight") is why(p, "neuron") is None
    assert "'input'" in why(p, "input")
    assert "float64" in why(p.double(), "weight")
    assert "strides" in why(p[:, :2], "weight")
    assert "strides" in why(torch.zeros(17, device=DEVICE)[1:].view(4, 4), "neuron")


def test_fused_on_a_cpu_without_compiler_falls_back(monkeypatch):
    from dessilbi.kernels import compiled

    monkeypatch.setattr(compiled, "why_not", lambda: "there is no C++ compiler (install g++, or set CXX)")
    p = nn.Parameter(torch.ones(4, 4))
    optimizer = DessiLBI([p], 0.1, fused=True)
    p.grad = torch.ones(4, 4)
    with pytest.warns(RuntimeWarning, match=r"no C\+\+ compiler.*foreach"):
        optimizer.step()
    assert optimizer.dual(p).any()


@pytest.mark.gpu
@pytest.mark.parametrize("level", SHAPES)
def test_defaults_on_a_gpu(level):
    """Triton is the default there, its steps wait for nothing, and it agrees with foreach."""
    runs = []
    for options in ({"foreach": True}, {}, {"fused": True}):
        torch.manual_seed(0)
        params = [nn.Parameter(w.cuda()) for w in start(SHAPES[level])]
        optimizer = DessiLBI([{"params": params, "group": level}], **COUPLING, momentum=0.9, **options)
        for k in range(10):
            for p in params:
                p.grad = torch.sin(p.detach() + k)
            if k > 1:
                torch.cuda.set_sync_debug_mode("error")
            optimizer.step()
            torch.cuda.set_sync_debug_mode("default")
        runs.append(torch.cat([p.detach().flatten() for p in params]))
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-5, atol=1e-6)
    assert torch.equal(runs[1], runs[2])


@pytest.mark.gpu
def test_fused_says_why_not_on_a_gpu():
    p = nn.Parameter(torch.ones(4, 4, device="cuda"))
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="fused=True.*'input'"):
        DessiLBI([{"params": [p], "group": "input"}], 0.1, fused=True).step()
    DessiLBI([{"params": [p], "group": "input"}], 0.1).step()


@pytest.mark.gpu
@pytest.mark.parametrize(("level", "scaling"), list(itertools.product(SHAPES, [False, True])))
def test_in_a_cuda_graph(level, scaling):
    """Replays equal eager steps, also after lr and λ, being tensors, were changed, and after eager steps between."""
    torch.manual_seed(0)
    shapes = SHAPES[level]
    values = [w.cuda() for w in start(shapes)]
    noise = [[torch.randn(s, device="cuda") for s in shapes] for _ in range(12)]

    def make():
        params = [nn.Parameter(w.clone()) for w in values]
        lr, lam = (torch.tensor(COUPLING[k], device="cuda") for k in ("lr", "lam"))
        options = {**COUPLING, "lr": lr, "lam": lam}
        return params, DessiLBI([{"params": params, "group": level}], momentum=0.9, scaling=scaling, **options)

    params, optimizer = make()
    graph_params, graph_optimizer = make()
    for p in graph_params:
        p.grad = torch.zeros_like(p)

    def fill(ps, k):
        for p, g in zip(ps, noise[k], strict=True):
            p.grad = g.clone() if p.grad is None else p.grad.copy_(g)

    for p in params:
        p.grad = None
    for k in range(3):
        for ps, o in ((params, optimizer), (graph_params, graph_optimizer)):
            fill(ps, k)
            o.step()
    graph = torch.cuda.CUDAGraph()
    saved = [p.detach().clone() for p in graph_params]
    with torch.cuda.graph(graph):
        graph_optimizer.step()
    assert all(torch.equal(p, s) for p, s in zip(graph_params, saved, strict=True))  # capturing runs nothing
    for k in range(3, 12):
        if k == 6:
            for o in (optimizer, graph_optimizer):
                o.lam = 0.11
                o.param_groups[0]["lr"].fill_(0.007)
        for p in params:
            p.grad = None
        fill(params, k)
        optimizer.step()
        fill(graph_params, k)
        if k == 8:  # an eager step between replays
            graph_optimizer.step()
        else:
            graph.replay()
    for p, q in zip(params, graph_params, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(optimizer.dual(p), graph_optimizer.dual(q))
    assert graph_optimizer.time == pytest.approx(optimizer.time)
