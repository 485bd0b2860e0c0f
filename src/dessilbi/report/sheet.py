"""A sheet of small images, as an HTML file without scripts or as a PNG."""

from __future__ import annotations

import base64
import io
import os
from dataclasses import dataclass
from html import escape
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from torch import Tensor

from dessilbi import files

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

_SIDE, _GAP, _ACROSS, _LABEL = 64, 10, 12, 84
# Up to this size the pixels of an image are of interest, such as those of a kernel.
_SMALL = 16
_BLUE, _PAPER, _INK, _MUTED = "#0b62b8", "#ffffff", "#1b2430", "#5a6472"
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_STYLE = """
:root { color-scheme: light dark; --bg: #f7f7f4; --ink: #1b2430; --muted: #5a6472; --blue: #0b62b8; }
@media (prefers-color-scheme: dark) { :root { --bg: #12161c; --ink: #e6eaef; --muted: #a3adb9; --blue: #62aef7; } }
body { margin: 0 auto; max-width: 1100px; padding: 28px 18px 60px; background: var(--bg); color: var(--ink);
  font: 15px/1.5 Inter, system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 26px; overflow-wrap: anywhere; } h2 { font-size: 19px; margin: 36px 0 2px; }
p { color: var(--muted); max-width: 76ch; margin: 0 0 12px; } div { overflow-x: auto; }
th { font-weight: 500; font-size: 13px; color: var(--muted); text-align: left; padding: 0 12px 4px 0; }
th { white-space: pre; } td { padding: 0 8px 8px 0; }
ul { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: 10px; }
img { display: block; width: 72px; height: 72px; outline: 3px solid transparent; }
.small { image-rendering: pixelated; } .in { outline-color: var(--blue); }
"""


@dataclass(frozen=True)
class Tile:
    """An image (channels, height, width) of numbers around zero; whether its filter is selected; what it shows."""

    values: Tensor
    selected: bool | None
    label: str


@dataclass(frozen=True)
class Row:
    label: str
    tiles: list[Tile]


@dataclass(frozen=True)
class Block:
    """Rows of images under the same headings; without headings, one row that goes on over several lines."""

    title: str
    note: str
    headings: list[str]
    rows: list[Row]
    first: Tile | None = None


@dataclass(frozen=True)
class Sheet:
    title: str
    facts: str
    blocks: list[Block]

    def save(self, file: str | os.PathLike[str]) -> FilePath:
        """Write it; the ending of the name says as what, .html or .png."""
        place = FilePath(file)
        match place.suffix.lower():
            case ".html":
                files.write_atomically(place, self.html().encode())
            case ".png":
                files.write_atomically(place, _png(self.image()))
            case _:
                raise ValueError(f"{place}: the name of a sheet must end in .html or .png")
        return place

    def html(self) -> str:
        """The page; it asks nothing of the network and runs nothing."""
        return (
            f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{escape(self.title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
            f"<h1>{escape(self.title)}</h1>\n<p>{escape(self.facts)}</p>\n"
            + "".join(map(_block, self.blocks))
            + "</body>\n</html>\n"
        )

    def image(self) -> Image:
        """The same as one image."""
        from PIL import Image, ImageDraw

        width = 2 * 24 + max([_width(block) for block in self.blocks] + [560])
        made = Image.new("RGB", (width, 4000), _PAPER)
        pen = ImageDraw.Draw(made)
        y = _write(pen, 24, 20, self.title, _INK, 18, width)
        y = _write(pen, 24, y + 4, self.facts, _MUTED, 12, width)
        for block in self.blocks:
            height = y + 80 + (_SIDE + _GAP) * (2 + sum(-(-len(row.tiles) // _ACROSS) for row in block.rows))
            if height > made.height:
                made = _taller(made, 2 * height)
                pen = ImageDraw.Draw(made)
            y = _draw(made, pen, block, y + 18, width)
        return made.crop((0, 0, width, y + 20))


def picture(tile: Tile) -> Image:
    """The image of a tile: zero is grey, the largest number white or black."""
    from PIL import Image

    values = tile.values.detach().float()
    values = values if values.shape[0] == 3 else values.mean(0, keepdim=True).expand(3, -1, -1)
    largest = float(values.abs().max()) or 1.0
    pixels = ((values / largest + 1) * 127.5).round().clamp(0, 255).byte()
    return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())


def _png(image: Image) -> bytes:
    data = io.BytesIO()
    image.save(data, "PNG", optimize=True)
    return data.getvalue()


# -- HTML ----------------------------------------------------------------------------------------------------------


def _block(block: Block) -> str:
    parts = [f"<h2>{escape(block.title)}</h2>\n<p>{escape(block.note)}</p>\n"]
    if block.first is not None:
        parts.append(f"<p>{_img(block.first)}</p>\n")
    if not block.headings:
        parts += [f"<ul>{''.join(f'<li>{_img(tile)}</li>' for tile in row.tiles)}</ul>\n" for row in block.rows]
        return "".join(parts)
    heads = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in block.headings)
    parts.append(f"<div><table><thead><tr><th></th>{heads}</tr></thead><tbody>\n")
    for row in block.rows:
        cells = "".join(f"<td>{_img(tile)}</td>" for tile in row.tiles)
        parts.append(f'<tr><th scope="row">{escape(row.label)}</th>{cells}</tr>\n')
    return "".join([*parts, "</tbody></table></div>\n"])


def _img(tile: Tile) -> str:
    label = escape(f"{tile.label}{', selected' if tile.selected else ''}", quote=True)
    data = base64.b64encode(_png(picture(tile))).decode()
    kinds = ["in"] * bool(tile.selected) + ["small"] * (max(tile.values.shape[1:]) <= _SMALL)
    return f'<img class="{" ".join(kinds)}" alt="{label}" title="{label}" src="data:image/png;base64,{data}">'


# -- PNG -----------------------------------------------------------------------------------------------------------


def _width(block: Block) -> int:
    if not block.headings:
        return _ACROSS * (_SIDE + _GAP)
    return _LABEL + len(block.headings) * (_SIDE + _GAP)


def _draw(made: Image, pen: ImageDraw, block: Block, y: int, width: int) -> int:
    y = _write(pen, 24, y, block.title, _INK, 15, width)
    y = _write(pen, 24, y + 2, block.note, _MUTED, 12, width) + 8
    if block.first is not None:
        _place(made, pen, block.first, 24, y)
        y += _SIDE + _GAP
    left = 24 + (_LABEL if block.headings else 0)
    for i, heading in enumerate(block.headings):
        for down, line in enumerate(heading.split("\n")):
            _write(pen, left + i * (_SIDE + _GAP), y + 14 * down, line, _MUTED, 11, width)
    y += max([14 * len(heading.split("\n")) for heading in block.headings], default=0) + 6
    for row in block.rows:
        _write(pen, 24, y + _SIDE // 2 - 8, row.label, _MUTED, 12, width)
        for i, tile in enumerate(row.tiles):
            down, across = divmod(i, _ACROSS) if not block.headings else (0, i)
            _place(made, pen, tile, left + across * (_SIDE + _GAP), y + down * (_SIDE + _GAP))
        y += (_SIDE + _GAP) * (1 if block.headings else -(-len(row.tiles) // _ACROSS))
    return y


def _place(made: Image, pen: ImageDraw, tile: Tile, x: int, y: int) -> None:
    from PIL import Image

    if tile.selected:
        pen.rectangle((x - 3, y - 3, x + _SIDE + 2, y + _SIDE + 2), fill=_BLUE)
    how = Image.Resampling.NEAREST if max(tile.values.shape[1:]) <= _SMALL else Image.Resampling.BICUBIC
    made.paste(picture(tile).resize((_SIDE, _SIDE), how), (x, y))


def _write(pen: ImageDraw, x: int, y: int, text: str, colour: str, size: int, width: int) -> int:
    """Write a text over as many lines as it takes; where the next may begin."""
    from PIL import ImageFont

    font = ImageFont.load_default(size)
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and x + pen.textlength(longer, font=font) > width - 24:
            lines.append(word)
        else:
            lines[-1] = longer
    for line in lines:
        pen.text((x, y), line, fill=colour, font=font)
        y += round(size * 1.4)
    return y


def _taller(image: Image, height: int) -> Image:
    from PIL import Image

    made = Image.new("RGB", (image.width, height), _PAPER)
    made.paste(image)
    return made
