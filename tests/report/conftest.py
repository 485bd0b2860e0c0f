"""Runs that were trained, and a browser to see their pages in: Debian's chromium, driven by playwright."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.runs import SMALL

from dessilbi.applications.comparison import Comparison, Grid
from dessilbi.applications.grow import grow
from dessilbi.applications.sparsify import prune
from dessilbi.report import build_page
from dessilbi.training import train
from dessilbi.training.run import Run

# With magnitude scaling some filters leave again: no layer is selected as a whole.
FIRST = SMALL.replace(epochs=4, keep_epochs=(2,), schedule="constant", scaling=True)
SECOND = FIRST.replace(scaling=False, linear="neuron", keep_epochs=())

Show = Callable[..., Any]


def program() -> str | None:
    """The browser: that of the environment variable CHROMIUM, or one that is installed."""
    names = (os.environ.get("CHROMIUM", ""), "chromium", "google-chrome")
    return next(filter(None, map(shutil.which, filter(None, names))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    # Of a module and not of the session: while it is there, no other test can run an event loop.
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    found = program()
    if found is None:
        pytest.skip("there is no browser: `make browser` installs Debian's chromium, or CHROMIUM says where one is")
    with driver.sync_playwright() as started:
        # Without a sandbox, as root in a container has none to offer; these pages are our own.
        opened = started.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def show(browser: Any) -> Iterator[Show]:
    """Open a file in a window of its own. In the end the page must have asked for nothing but itself, and the console
    must be silent."""
    contexts, complaints, requests = [], [], []

    def open_it(file: Path, width: int = 1280, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 860}, accept_downloads=True, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
        context.on("request", lambda request: requests.append(request.url))
        address = Path(file).resolve().as_uri()
        page.goto(address)
        requests.remove(address)
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert complaints == []
    assert [url for url in requests if not url.startswith("blob:")] == []


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="session")
def run(place: Path) -> Run:
    """Filters of a convolution, and single weights of a linear layer, with magnitude scaling."""
    torch.manual_seed(0)
    train(FIRST, place / "plain", command="dessilbi train --run plain")
    return Run.open(place / "plain")


@pytest.fixture(scope="session")
def unscaled(place: Path) -> Run:
    """The same without magnitude scaling, by neurons."""
    torch.manual_seed(0)
    train(SECOND, place / "unscaled", command="dessilbi train --run unscaled")
    return Run.open(place / "unscaled")


@pytest.fixture(scope="session")
def pruned(run: Run) -> Run:
    prune(run, run.folder.with_name("pruned"), level="filter", keep=0.5, rounds=0)
    return Run.open(run.folder.with_name("pruned"))


@pytest.fixture(scope="session")
def grown(place: Path) -> Run:
    torch.manual_seed(0)
    config = SMALL.replace(model="tests.training.nets:seed", keep=None, lam=0.002, lr=0.02, schedule="constant",
                           epochs=9, grow_options={"every": 1, "then": 1, "policy": "uniform", "by": 0.5,
                                                   "growths": 2})  # fmt: skip
    grow(config, place / "grown")
    return Run.open(place / "grown")


@pytest.fixture(scope="session")
def compared(place: Path) -> Comparison:
    search = SMALL.replace(conv="weight", keep=None, lam=0.02, schedule="constant", epochs=2)
    grid = Grid(search, ("dense", "dessilbi@1", "magnitude"), (0.3, 0.1), seeds=(0, 1), epochs=1, rewind=1)
    made = Comparison.create(place / "tickets", grid)
    assert made.go() == []
    return made


@pytest.fixture(scope="session")
def page_file(run: Run) -> Path:
    return build_page([run.folder], run.folder.with_name("plain.html"))


@pytest.fixture(scope="session")
def all_file(run: Run, unscaled: Run, pruned: Run, grown: Run, compared: Comparison, place: Path) -> Path:
    """Everything there is on one page."""
    folders = [run.folder, unscaled.folder, pruned.folder, grown.folder, compared.folder]
    return build_page(folders, place / "all.html")
