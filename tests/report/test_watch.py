"""The page of a run while it trains: new epochs come onto it; nobody else reads it."""

import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dessilbi import Path as SolutionPath
from dessilbi.report.watch import server
from dessilbi.training.run import Run


class Watched:
    """A run, some epochs of which have not happened yet, and the server of its page."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.folder = Path(shutil.copytree(run.folder, folder / "live"))
        self.metrics = (self.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        self.whole = run.path_file
        self.points = [point["point"] for point in SolutionPath.load(self.whole).points]
        (self.folder / "status.json").write_text(json.dumps({"status": "running"}))
        self.at_epoch(2)
        self.server = server(self.folder)
        self.host, self.port = self.server.server_address[:2]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def at_epoch(self, epoch: int) -> None:
        """As the loop would have left it there: the path first, then the metrics."""
        path = SolutionPath.load(self.whole)
        path.truncate(1 + self.points.index(epoch))
        path.save(self.folder / "path.safetensors")
        (self.folder / "metrics.jsonl").write_text("".join(self.metrics[:epoch]))

    def ask(self, path: str, host: str | None = None, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(str(self.host), int(self.port), timeout=10)
        connection.request(method, path, headers={"Host": host} if host else {})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()


@pytest.fixture
def watched(run: Run, tmp_path: Path) -> Iterator[Watched]:
    made = Watched(run, tmp_path)
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_only_this_machine_reaches_it(watched: Watched) -> None:
    assert watched.server.socket.getsockname()[0] == "127.0.0.1"
    others = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {"127.0.0.1"}
    for address in {str(a) for a in others if not str(a).startswith("127.")}:
        with pytest.raises(OSError), socket.create_connection((address, int(watched.port)), timeout=1):
            pass


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("localhost:8000", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("[::1", 403),
    ],
)
def test_a_page_of_another_site_cannot_read_it_through_the_browser(watched: Watched, host: str, status: int) -> None:
    """A name that was made to lead here (DNS rebinding) is not one of ours."""
    for path in ("/", "/data.json"):
        found, headers, body = watched.ask(path, host)
        assert found == status
        assert ("plain" in body.decode() or "live" in body.decode()) == (status == 200)
        assert "Access-Control-Allow-Origin" not in headers


def test_it_answers_what_is_new_and_nothing_else(watched: Watched) -> None:
    first = json.loads(watched.ask("/data.json")[2])
    assert first["runs"][0]["metrics"]["epoch"] == [1, 2]
    state = first["version_of_data"]
    assert watched.ask(f"/data.json?after={state}")[0] == 204
    watched.at_epoch(3)
    status, _, body = watched.ask(f"/data.json?after={state}")
    assert (status, json.loads(body)["runs"][0]["metrics"]["epoch"]) == (200, [1, 2, 3])
    for path in ("/config.toml", "/../config.toml", "/%2e%2e/config.toml", "//etc/passwd"):
        assert watched.ask(path)[0] == 404
    assert watched.ask("/", method="POST")[0] == 501


def test_a_file_caught_half_written_leaves_the_last_page(watched: Watched) -> None:
    before = json.loads(watched.ask("/data.json")[2])
    file = watched.folder / "path.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    status, _, body = watched.ask("/data.json")
    assert (status, json.loads(body)) == (200, before)
    file.write_bytes(whole)
    watched.at_epoch(3)
    assert json.loads(watched.ask("/data.json")[2])["runs"][0]["metrics"]["epoch"] == [1, 2, 3]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no config\.toml"):
        server(tmp_path)


@pytest.fixture
def window(browser: Any, watched: Watched) -> Iterator[tuple[Any, Callable[[], list[str]]]]:
    page = browser.new_page()
    complaints: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(f"http://127.0.0.1:{watched.port}/")
    yield page, lambda: complaints
    page.close()
    assert all(url.startswith(f"http://127.0.0.1:{watched.port}/") for url in requests)


def test_epochs_come_onto_the_page_as_they_end(window: tuple[Any, Callable[[], list[str]]], watched: Watched) -> None:
    page, complaints = window
    epoch = page.locator("#now-epoch")
    assert epoch.inner_text() == "2"
    watched.at_epoch(3)
    page.locator("#now-epoch", has_text=re.compile("^3$")).wait_for(timeout=5000)
    assert json.loads(watched.metrics[2])["dense"] == pytest.approx(
        float(page.locator("#now-dense").inner_text()[:-2]) / 100, abs=6e-5
    )
    # One who looks back is left there.
    page.locator("#keep summary").click()
    slider = page.get_by_role("slider")
    slider.focus()
    slider.press("Home")
    first = epoch.inner_text()
    page.locator("#training").scroll_into_view_if_needed()
    where = page.evaluate("scrollY")
    watched.at_epoch(4)
    (watched.folder / "status.json").write_text(json.dumps({"status": "finished"}))
    page.locator(".facts", has_text="finished").wait_for(timeout=5000)
    assert page.evaluate("document.activeElement.id") == "moment"
    assert page.locator("#keep details").get_attribute("open") is not None
    assert epoch.inner_text() == first
    assert page.evaluate("scrollY") == pytest.approx(where, abs=2)
    assert slider.get_attribute("max") == str(len(watched.points) - 1)
    assert complaints() == []


def test_the_command_serves_until_ctrl_c_and_the_page_says_that_it_is_gone(browser: Any, run: Run) -> None:
    command = [sys.executable, "-m", "dessilbi.cli", "watch", str(run.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = re.fullmatch(rf"{re.escape(str(run.folder))}: (http://127\.0\.0\.1:\d+/) \(Ctrl-C ends\)\n", line)
        assert address is not None, line
        page = browser.new_page()
        page.goto(address[1])
        page.locator("#live", has_text="Live: epochs appear as they end.").wait_for()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
        page.locator("#live", has_text="The server does not answer").wait_for(timeout=5000)
        page.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
