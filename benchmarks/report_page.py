"""The page of a VGG16 with 200 points, built and used: `python -m benchmarks.report_page [--path FILE] [--json FILE]`.

4 224 filters of 13 convolutions at 200 points of a path, which is recorded first (five steps a point, with the
learning rate, momentum and weight decay of the paper, so that norms move as much as in an epoch; of 8 images of
scikit-learn's digits, enlarged to 32×32; minutes on two cores) unless FILE has one. Measured are

- the command `dessilbi report`, from its start to its end, and the size of the page;
- in a browser, when the page is ready for its reader, and when the last task longer than 50 ms has ended;
- one movement of the slider: the time its handlers and the layout take, and the time until the browser has shown it
  (Event Timing, for real keys; the browser rounds it to 8 ms), at four places of the page.

Goals: 10 s, 3 MB, 1 s, 50 ms.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path as FilePath
from typing import Any

import torch
from torch.nn import functional as F

from dessilbi import DessiLBI, Path, TargetThreshold, param_groups
from dessilbi.data import read
from dessilbi.models import create
from dessilbi.training.environment import commit

POINTS, STEPS, BATCH, KEYS = 200, 5, 8, 60
SECTIONS = ("main", "#path figure:nth-child(7)", "#selected", "#training")
# What a movement costs the page itself: its handlers, and the layout that follows.
MOVE = """() => {
  const slider = document.getElementById("moment"), times = [];
  for (let k = 0; k <= Number(slider.max); k++) {
    const begun = performance.now();
    slider.value = k;
    slider.dispatchEvent(new Event("input", { bubbles: true }));
    document.body.offsetHeight;
    times.push(performance.now() - begun);
  }
  return times;
}"""
WATCH = """() => {
  window.seen = [];
  new PerformanceObserver(list => window.seen.push(...list.getEntries()
    .filter(e => e.name === "keydown").map(e => e.duration)))
    .observe({ type: "event", durationThreshold: 16 });
  window.tasks = [];
  new PerformanceObserver(list => window.tasks.push(...list.getEntries().map(e => e.startTime + e.duration)))
    .observe({ type: "longtask", buffered: true });
}"""


def record(file: FilePath) -> None:
    """A path in the form that a run leaves: every filter in its group, loss and accuracy with every point."""
    torch.manual_seed(0)
    images = read("digits", split="train")
    x = F.interpolate(torch.as_tensor(images.images).float().view(-1, 1, 8, 8) / 64 - 1, size=32).expand(-1, 3, -1, -1)
    y = torch.as_tensor(images.labels).long()
    model = create("vgg16")
    groups = param_groups(model, conv="filter", linear=None)
    optimizer = DessiLBI(groups, lr=0.1, momentum=0.9, weight_decay=5e-4, nu=500.0)
    threshold = TargetThreshold(optimizer, keep=0.3, ramp=0.3)
    path = Path(model, optimizer)
    for point in range(1, POINTS + 1):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / 5 ** ((point - 1) // 60)
        for _ in range(STEPS):
            batch = torch.randint(len(x), (BATCH,))
            optimizer.zero_grad()
            out = model(x[batch])
            loss = F.cross_entropy(out, y[batch])
            loss.backward()
            optimizer.step()
        threshold.step(point / POINTS)
        path.record(point, loss=loss.item(), dense=(out.argmax(1) == y[batch]).double().mean().item())
        if point % 20 == 0:
            print(f"recorded {point} of {POINTS} points", flush=True)
    path.save(file)


def build(path: FilePath, page: FilePath) -> float:
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-m", "dessilbi.cli", "report", str(path), "-o", str(page)],
                   check=True, stdout=subprocess.DEVNULL)  # fmt: skip
    return time.perf_counter() - begun


def use(page_file: FilePath, opened: int) -> dict[str, Any]:
    """Open it several times, then move its slider."""
    from playwright.sync_api import sync_playwright

    program = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        raise SystemExit("there is no browser: `make browser` installs Debian's chromium")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        ready, quiet = [], []
        for _ in range(opened):
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(page_file.resolve().as_uri())
            page.evaluate(WATCH)
            page.wait_for_timeout(1500)
            ready.append(page.evaluate("performance.getEntriesByName('interactive')[0].startTime"))
            quiet.append(max([ready[-1], *page.evaluate("window.tasks")]))
            if len(ready) < opened:
                page.close()
        moves: dict[str, Any] = {}
        for where in SECTIONS:
            page.locator(where).first.evaluate("e => e.scrollIntoView()")
            page.wait_for_timeout(1500)
            own = page.evaluate(MOVE)
            page.evaluate("document.getElementById('moment').focus({ preventScroll: true }); window.seen = []")
            for k in range(KEYS):
                page.keyboard.press("ArrowLeft" if k < KEYS // 2 else "ArrowRight")
                page.wait_for_timeout(20)
            page.wait_for_timeout(300)
            shown = page.evaluate("window.seen")  # shorter than 16 ms are not reported: they count as 16
            shown = sorted(shown + [16] * max(0, KEYS - len(shown)))
            moves[where] = {
                "own_ms_median": statistics.median(own), "own_ms_max": max(own),
                "shown_ms_median": statistics.median(shown), "shown_ms_95": shown[int(0.95 * len(shown))],
            }  # fmt: skip
        version = browser.version
        browser.close()
    return {"browser": f"Chromium {version}", "interactive_ms": ready, "quiet_ms": quiet, "slider": moves}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--path", metavar="FILE", type=FilePath, help="recorded before; recorded there if it is absent")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.path or FilePath(folder) / "vgg16.path"
        if not path.exists():
            record(path)
        page = FilePath(folder) / "vgg16.html"
        seconds = [build(path, page) for _ in range(arguments.rounds)]
        recorded = Path.load(path)
        found = {
            "command": "python -m benchmarks.report_page", "date": str(datetime.date.today()), "commit": commit(),
            "machine": f"{platform.platform()}, {os.cpu_count()} cores", "load": os.getloadavg()[0],
            "points": len(recorded), "filters": sum(recorded.shape(name)[0] for name in recorded.names),
            "build_seconds": seconds, "megabytes": page.stat().st_size / 1e6, **use(page, arguments.rounds),
        }  # fmt: skip
    slider = found["slider"].values()
    rows = [
        ("report", statistics.median(found["build_seconds"]), 10, "s"),
        ("size", found["megabytes"], 3, "MB"),
        ("interactive", statistics.median(found["interactive_ms"]), 1000, "ms"),
        ("no long task after", statistics.median(found["quiet_ms"]), 1000, "ms"),
        ("slider, the page's own time (worst place, worst move)", max(s["own_ms_max"] for s in slider), 50, "ms"),
        ("slider, until shown (worst place, 95 %)", max(s["shown_ms_95"] for s in slider), 50, "ms"),
    ]
    print(f"{found['filters']} filters x {found['points']} points, {found['browser']}, {found['machine']}")
    for name, value, goal, unit in rows:
        print(f"{name:54} {value:8.2f} {unit:2}  goal {goal} {unit}: {'met' if value < goal else 'missed'}")
    if arguments.json:
        FilePath(arguments.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
