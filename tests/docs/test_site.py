"""The documentation as a site: built strictly, without a network; every page in the menu, every link to something."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs.pages import DOCS, ROOT

import dessilbi

pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed: pip install 'dessilbi[docs]'")

# What a build in a process of its own does before anything else: no connection leaves it.
_ALONE = """
import socket, sys
def refuse(*_, **__): raise OSError("the documentation is built without a network")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
from mkdocs.__main__ import cli
cli(["build", "--strict", "--config-file", sys.argv[1], "--site-dir", sys.argv[2]])
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _ALONE, str(ROOT / "mkdocs.yml"), str(place)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return place


def test_every_page_is_in_the_menu(site: Path) -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    named = set(re.findall(r"[\w./-]+\.md", menu))
    assert named == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    for page in named:
        assert (site / page).with_suffix(".html").is_file()


def test_the_reference_has_every_public_name(site: Path) -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (site / "api").glob("*.html"))
    anchors = set(re.findall(r'id="dessilbi\.([\w.]+)"', text))
    missing = [name for name in dessilbi.__all__ if not any(a.split(".")[-1] == name for a in anchors)]
    assert missing == ["NEVER"]  # a number
    described = (site / "api" / "optimizers.html").read_text(encoding="utf-8")
    assert "magnitude scaling" in described.lower()


def test_a_browser_fetches_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?://[^"]+)"', text)
        assert not loaded, (page.name, loaded)


def test_every_link_leads_somewhere() -> None:
    pages = [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for page in pages:
        text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if not link.startswith(("http://", "https://", "#")):
                assert (page.parent / link.split("#")[0]).exists(), f"{page.name}: {link}"
