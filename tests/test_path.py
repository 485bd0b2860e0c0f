"""The record of a run: what goes in comes out, in memory and through a file."""

import math
import os
import subprocess
import sys
import textwrap
import time
import zlib

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from dessilbi import NEVER, DessiLBI, Path, param_groups
from dessilbi.files import load_arrays, save_arrays
from dessilbi.path import QUANTILES, early_points


def small_run(points=12, conv="filter", **options):
    """A run, its path, and an independent record of the same by plain copies."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 5))
    optimizer = DessiLBI(param_groups(model, conv=conv), 0.1, nu=5.0, lam=0.02, momentum=0.9, **options)
    path, copies = Path(model, optimizer), []
    x, y = torch.randn(32, 1, 8, 8), torch.randint(0, 5, (32,))
    for k in range(points):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if k == points - 3:
            optimizer.lam = 0.08  # groups leave
        path.record(k + 1, loss=loss.item())
        copies.append({
            name: [optimizer.support(p).clone(), p.detach().clone(), optimizer.dual(p).clone(), optimizer.gamma(p)]
            for name, p in model.named_parameters() if name.endswith("weight")
        })  # fmt: skip
    return model, optimizer, path, copies


@pytest.fixture(scope="module")
def run():
    return small_run()


def check(path, copies):
    assert path.names == ["0.weight", "3.weight"]
    for name in path.names:
        supports = torch.stack([c[name][0] for c in copies])
        first = torch.where(supports.any(0), supports.int().argmax(0), NEVER)
        assert torch.equal(path.entry(name), first.int())
        for at in (*range(len(copies)), -1, -3):
            assert torch.equal(path.support(name, at), supports[at])
        torch.testing.assert_close(path.keep(name), supports.flatten(1).double().mean(1))
    filters = path.norms("0.weight")
    for i, recorded in enumerate(filters):
        expected = torch.stack([c["0.weight"][i + 1].flatten(1).norm(dim=1) for c in copies])
        torch.testing.assert_close(recorded, expected)
    for i, recorded in enumerate(path.norms("3.weight")):
        expected = np.stack([np.quantile(c["3.weight"][i + 1].abs().numpy(), QUANTILES) for c in copies])
        np.testing.assert_allclose(recorded.numpy(), expected, rtol=1e-4, atol=1e-7)


def test_queries_agree_with_plain_copies(run):
    _, _, path, copies = run
    assert (path.entry("0.weight") != NEVER).any()
    check(path, copies)


def test_groups_leave_in_this_run(run):
    _, _, path, _ = run
    assert path.keep()[-1] < path.keep()[-4]


def test_points(run):
    _, _, path, copies = run
    assert len(path) == len(copies)
    last = path.points[-1]
    assert last["point"] == 12
    assert last["time"] == pytest.approx(1.2)
    assert last["lam"] == 0.08
    assert last["loss"] > 0


def test_round_trip_and_resume(run, tmp_path):
    model, optimizer, path, copies = run
    path.save(tmp_path / "a.path")
    loaded = Path.load(tmp_path / "a.path")
    check(loaded, copies)
    assert loaded.points == path.points
    with pytest.raises(ValueError, match="attach"):
        loaded.record(13)
    loaded.attach(model, optimizer)
    loaded.record(13)
    assert torch.equal(loaded.support("3.weight"), optimizer.support(model[3].weight))
    other = nn.Sequential(nn.Conv2d(1, 7, 3))
    with pytest.raises(ValueError, match="0.weight"):
        Path.load(tmp_path / "a.path").attach(other, DessiLBI(param_groups(other), 0.1))


def test_scaling_and_weight_level():
    _, _, path, copies = small_run(8, conv="weight", scaling=True)
    for name in path.names:
        assert torch.equal(path.support(name), copies[-1][name][0])
        for i, recorded in enumerate(path.norms(name)):
            expected = np.quantile(copies[-1][name][i + 1].abs().numpy(), QUANTILES)
            np.testing.assert_allclose(recorded[-1].numpy(), expected, rtol=1e-4, atol=1e-7)


def test_names_through_wrappers():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1] = torch.compile(model[1])
    optimizer = DessiLBI(param_groups(model), 0.1)
    assert Path(torch.compile(model), optimizer).names == ["0.weight", "1.weight"]


def test_under_two_bytes_a_weight_for_200_points(tmp_path):
    """A support that grows to 6 % over 200 points while a tenth of its members change from one point to the next.

    With |V| of every weight, which is normally distributed.
    """
    torch.manual_seed(0)
    n = 400_000
    p = nn.Parameter(torch.zeros(400, 1000))
    optimizer = DessiLBI([p], 1.0, nu=1.0, lam=0.0)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    model = nn.Module()
    model.w = p
    path = Path(model, optimizer)
    score = torch.randn(n).view_as(p)
    for k in range(200):
        v = score + 0.05 * torch.randn_like(score)
        optimizer.dual(p).copy_(v)
        optimizer.lam = float(v.abs().flatten().kthvalue(int(n * (1 - 0.06 * (k + 1) / 200))).values)
        path.record(k)
    path.save(tmp_path / "p")
    churn = (path.support("w", -1) ^ path.support("w", -2)).sum() / path.support("w").sum()
    assert churn > 0.1
    assert torch.equal(Path.load(tmp_path / "p").support("w"), optimizer.support(p))
    torch.testing.assert_close(
        Path.load(tmp_path / "p").magnitude("w"), v.abs(), rtol=0.05, atol=float(v.max()) / 2**15
    )
    assert os.path.getsize(tmp_path / "p") < 2 * n


def test_recording_is_cheap_beside_an_epoch():
    """Under 1 % of an epoch of 100 steps of a small network (real epochs are far longer)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.Flatten(), nn.Linear(64 * 144, 10))
    optimizer = DessiLBI(param_groups(model), 0.01, momentum=0.9)
    path = Path(model, optimizer)
    x, y = torch.randn(32, 3, 16, 16), torch.randint(0, 10, (32,))

    def step():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    def seconds(work, times):
        took = []
        for _ in range(times):
            start = time.perf_counter()
            work()
            took.append(time.perf_counter() - start)
        return float(np.median(took))

    step()
    assert seconds(lambda: path.record(0), 9) < 0.01 * 100 * seconds(step, 15)


def test_a_crash_while_saving_leaves_the_old_file(run, tmp_path):
    _, _, path, copies = run
    file = tmp_path / "run.path"
    path.save(file)
    code = f"""
        import os, signal, dessilbi
        from dessilbi import files
        path = dessilbi.Path.load({str(file)!r})
        path._records[0]["point"] = 99.0
        real = os.fsync
        def dies(handle):
            os.kill(os.getpid(), signal.SIGKILL)
        os.fsync = dies
        path.save({str(file)!r})
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False).returncode == -9
    check(Path.load(file), copies)
    assert Path.load(file).points[0]["point"] == 1.0


def test_a_full_disk_leaves_the_old_file_and_no_litter(run, tmp_path, monkeypatch):
    _, _, path, _ = run
    file = tmp_path / "run.path"
    path.save(file)
    before = file.read_bytes()

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        path.save(file)
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == ["run.path"]


def test_bad_files_say_so_in_one_line(run, tmp_path):
    _, _, path, _ = run
    file = tmp_path / "run.path"
    path.save(file)
    whole = file.read_bytes()
    cases = {
        "truncated": whole[: len(whole) // 2],
        "empty": b"",
        "foreign": b"PK\x03\x04 something else entirely",
        "damaged": whole[:-600] + b"\x00" * 600,
        "newer": whole.replace(b'\\"version\\": 2', b'\\"version\\": 7'),
    }
    save_file({"x": torch.zeros(2)}, tmp_path / "other")
    cases["not ours"] = (tmp_path / "other").read_bytes()
    assert cases["newer"] != whole
    for name, data in cases.items():
        file.write_bytes(data)
        with pytest.raises(ValueError, match="run.path") as error:
            Path.load(file)
        assert "\n" not in str(error.value), name
    file.write_bytes(cases["newer"])
    with pytest.raises(ValueError, match="7 is newer"):
        Path.load(file)
    with pytest.raises(FileNotFoundError):
        Path.load(tmp_path / "nowhere")


def test_bad_queries(run):
    model, optimizer, path, _ = run
    with pytest.raises(ValueError, match="'fc'.*0.weight"):
        path.support("fc")
    with pytest.raises(ValueError, match="at=12.*12 points"):
        path.support("0.weight", 12)
    with pytest.raises(ValueError, match="time"):
        path.record(1, time=3.0)
    with pytest.raises(ValueError, match="not a parameter of the model"):
        Path(nn.Linear(2, 2), optimizer)
    plain = DessiLBI([{"params": model.parameters(), "group": None}], 0.1)
    with pytest.raises(ValueError, match="penalises nothing"):
        Path(model, plain)


def test_early_points():
    assert early_points(391) == [1, 3, 11, 36, 119]  # 391 ** (i / 5)
    assert early_points(1) == []
    assert all(0 < p < 50 for p in early_points(50, 8))
    with pytest.raises(ValueError, match="steps .*0"):
        early_points(0)


def test_truncate(run, tmp_path):
    model, optimizer, path, copies = run
    path.save(tmp_path / "p")
    short = Path.load(tmp_path / "p")
    short.truncate(5)
    check(short, copies[:5])
    short.attach(model, optimizer)
    short.record(6)
    assert torch.equal(short.support("3.weight"), optimizer.support(model[3].weight))
    with pytest.raises(ValueError, match="between 0 and 6, got 9"):
        short.truncate(9)


def test_note():
    p = nn.Linear(3, 3)
    path = Path(p, DessiLBI(p.parameters(), 0.1))
    with pytest.raises(ValueError, match="record"):
        path.note(accuracy=0.5)
    path.record(1, loss=2.0)
    path.note(accuracy=0.5, loss=1.0)
    assert (path.points[0]["accuracy"], path.points[0]["loss"]) == (0.5, 1.0)
    with pytest.raises(ValueError, match="lam"):
        path.note(lam=0.5)


def test_per_layer_lam_is_not_one_number():
    p = nn.Linear(3, 3)
    optimizer = DessiLBI([{"params": [p.weight], "lam": torch.tensor([0.5])}], 0.1)
    path = Path(p, optimizer)
    path.record(0)
    assert math.isnan(path.points[0]["lam"])


def weights_of(v):
    """A path of one point at which V is this."""
    model = nn.Linear(v.numel(), 1, bias=False)
    optimizer = DessiLBI(param_groups(model), 0.1)
    optimizer.state[model.weight]["dual"] = v.view(1, -1)
    path = Path(model, optimizer)
    path.record(1)
    return path, optimizer.dual(model.weight)


@pytest.mark.parametrize("scale", [1.0, 3e-20, 7e25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_magnitudes_of_weights_over_nearly_sixteen_octaves(scale, dtype, tmp_path):
    v = torch.cat([2 ** -torch.linspace(0, 15.8, 5000), 2 ** -torch.linspace(16.1, 30, 100), torch.zeros(3)]).to(dtype)
    v = v[torch.randperm(v.numel())] * scale
    path, _ = weights_of(v * torch.randn_like(v).sign())
    found = path.magnitude("weight").flatten()
    large = v >= 2**-15.81 * scale
    assert (found[large] / v[large] - 1).abs().max() < 0.033
    assert (found[v < 2**-16.05 * scale] == 0).all()
    assert torch.equal(found[v.argsort()], found.sort().values)
    path.save(tmp_path / "p")
    assert torch.equal(Path.load(tmp_path / "p").magnitude("weight").flatten(), found)


@pytest.mark.parametrize("v", [[0.0, 0, 0], [1e-45, 1e-40, 0], [math.nan, 1, 2], [math.inf, 1, 0]])
def test_magnitudes_of_odd_values(v):
    path, _ = weights_of(torch.tensor(v))
    found = path.magnitude("weight").flatten()
    assert found.shape == (3,)
    assert not found[2] > 0


def test_magnitudes_follow_the_last_point(run, tmp_path):
    _, _, path, copies = run
    for at in (0, 4, -1):
        torch.testing.assert_close(path.magnitude("0.weight", at), copies[at]["0.weight"][2].flatten(1).norm(dim=1))
    expected = copies[-1]["3.weight"][2].abs()
    torch.testing.assert_close(path.magnitude("3.weight", 0), expected, rtol=0.033, atol=float(expected.max()) / 2**15)
    path.save(tmp_path / "p")
    loaded = Path.load(tmp_path / "p")
    loaded.truncate(len(loaded))
    assert torch.equal(loaded.magnitude("3.weight"), path.magnitude("3.weight"))
    loaded.truncate(len(loaded) - 1)
    assert not loaded.magnitude("3.weight").any()
    first, dual = weights_of(torch.tensor([1.0, 2.0]))
    dual.mul_(3)
    torch.testing.assert_close(first.magnitude("weight"), torch.tensor([[1.0, 2.0]]), rtol=0.033, atol=0)


def test_damage_inside_a_file(run, tmp_path):
    _, _, path, _ = run
    file = tmp_path / "run.path"
    path.save(file)
    arrays, header = load_arrays(file, "path", 2)
    tensor = header["tensors"][1]
    for wrong in [{"cut": [[0], 1]}, {"filters": []}, {"cut": [[7], 1]}, {"cut": 3}, {"top": "x"}, {"top": -1}]:
        save_arrays(file, "path", 2, arrays, {**header, "tensors": [header["tensors"][0], {**tensor, **wrong}]})
        with pytest.raises(ValueError, match=r"run\.path: damaged path file"):
            Path.load(file)
    for codes in (b"", zlib.compress(b"123"), b"\x00" * 9):
        broken = {**arrays, "1.codes": np.frombuffer(codes, dtype=np.uint8)}
        save_arrays(file, "path", 2, broken, header)
        with pytest.raises(ValueError, match=r"run\.path: damaged path file"):
            Path.load(file)
