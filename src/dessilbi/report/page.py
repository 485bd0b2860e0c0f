"""The page: data, styles and scripts in one HTML file that opens from disk and asks nothing of the network."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from html import escape
from importlib.resources import files as resources
from pathlib import Path as FilePath
from typing import Any

from dessilbi import __version__, files
from dessilbi.report.contents import Target, contents

_SCRIPTS = ("uplot/uPlot.iife.min.js", "data.js", "elements.js", "charts.js", "lines.js", "shapes.js", "sections.js",
            "growing.js", "comparing.js", "page.js")  # fmt: skip
_STYLES = ("uplot/uPlot.min.css", "page.css")


def build_page(targets: Iterable[Target], file: Target) -> FilePath:
    """Write the page of run folders, comparisons of tickets and files that `Path.save` wrote.

    Args:
        targets: what to show; several runs are compared as well.
        file: the HTML file; one that is there is replaced.

    Returns:
        The file.
    """
    place = FilePath(file)
    files.write_atomically(place, render(contents(targets)).encode())
    return place


def render(shown: Mapping[str, Any], live: bool = False) -> str:
    """The page of such contents. Nothing in them is taken for HTML or code; a live page asks its server for more."""
    names = [thing["name"] for thing in [*shown["runs"], *shown["comparisons"]]]
    title = ", ".join(names) + " · dessilbi"
    made = datetime.now(UTC).isoformat(timespec="seconds")
    data = as_script({**shown, "made": made, "version": __version__, "live": live})
    script, style = (_assets(which) for which in (_SCRIPTS, _STYLES))
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash(script)}",
            f"style-src {_hash(style)}",
            "img-src data: blob:",
            *(["connect-src 'self'"] if live else []),
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"<noscript>This page draws its figures with JavaScript: please allow it. "
        f"It asks nothing of the network.</noscript>\n"
        f'<script type="application/json" id="data">{data}</script>\n<script>{script}</script>\n</body>\n</html>\n'
    )


def as_script(value: Any) -> str:
    """JSON that no parser of HTML takes for the end of the script that holds it, or for a comment."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("utf-8", "replace").decode("utf-8")


def _assets(names: Iterable[str]) -> str:
    folder = resources("dessilbi.report") / "assets"
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
