"""The page for all who look at it: on a phone, with a keyboard, in the dark, without telling red from green."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.report.conftest import Show

Colour = tuple[float, float, float]

# -- colours, worked out here (WCAG 2.2; CIE 1976 L*a*b*; Machado, Oliveira and Fernandes 2009, severity 1) ------------

_SIGHT = {
    "without green cones": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                            [-0.011820, 0.042940, 0.968881]],
    "without red cones": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                          [-0.003882, -0.048116, 1.051998]],
    "usual": np.eye(3).tolist(),
}  # fmt: skip
_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)


def linear(colour: Colour) -> np.ndarray:
    c = np.array(colour) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def contrast(one: Colour, other: Colour) -> float:
    dark, light = sorted(float(np.array([0.2126, 0.7152, 0.0722]) @ linear(c)) for c in (one, other))
    return (light + 0.05) / (dark + 0.05)


def apart(one: Colour, other: Colour, sight: str) -> float:
    """How different two colours look: the distance in L*a*b*, in which 2.3 can just be noticed."""

    def lab(colour: Colour) -> np.ndarray:
        t = _XYZ @ np.clip(np.array(_SIGHT[sight]) @ linear(colour), 0, 1) / np.array([0.95047, 1.0, 1.08883])
        f = np.where(t > 216 / 24389, np.cbrt(t), (24389 / 27 * t + 16) / 116)
        return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])

    return float(np.linalg.norm(lab(one) - lab(other)))


def test_the_measures_themselves() -> None:
    assert contrast((0, 0, 0), (255, 255, 255)) == pytest.approx(21)
    assert contrast((119, 119, 119), (255, 255, 255)) == pytest.approx(4.48, abs=0.01)
    assert apart((0, 0, 0), (255, 255, 255), "usual") == pytest.approx(100, abs=0.1)
    # A red and a green of one lightness.
    red, green = (189, 85, 60), (107, 125, 55)
    assert apart(red, green, "usual") > 3 * apart(red, green, "without green cones")


# Every piece of text that is shown, its colour, and what is behind it.
TEXTS = """() => {
  const parse = text => { const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number); return [r, g, b, a]; };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
  while (walker.nextNode()) {
    const node = walker.currentNode, element = node.parentElement;
    if (!node.textContent.trim() || element.closest("script, style, noscript, option, title")) continue;
    if (!element.getClientRects().length || element.closest(".skip")) continue;
    let behind = element, back = null;
    while (behind && !(back = parse(getComputedStyle(behind).backgroundColor))[3]) behind = behind.parentElement;
    const style = getComputedStyle(element);
    found.push([node.textContent.trim(), parse(element.closest("svg") ? style.fill : style.color), back]);
  }
  return found;
}"""
# What charts are drawn with, as the browser takes it from the style sheet.
DRAWN = """() => {
  const paper = document.createElement("canvas").getContext("2d"), style = getComputedStyle(document.documentElement);
  const names = ["blue", "orange", "sky", "violet", "gold", "grey", "ink", "light", "card", "bg"];
  return Object.fromEntries(names.map(name => {
    paper.fillStyle = style.getPropertyValue(`--${name}`);
    return [name, paper.fillStyle];
  }));
}"""


def drawn_in(page: Any) -> dict[str, Colour]:
    return {name: tuple(int(code[i : i + 2], 16) for i in (1, 3, 5)) for name, code in page.evaluate(DRAWN).items()}  # type: ignore[misc]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_lines_are_legible(show: Show, all_file: Path, scheme: str) -> None:
    page = show(all_file, color_scheme=scheme)
    page.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
    page.wait_for_timeout(500)  # the tables fill
    texts = page.evaluate(TEXTS)
    assert len(texts) > 500
    for text, colour, back in texts:
        assert colour[3] == back[3] == 1
        assert contrast(colour[:3], back[:3]) >= 4.5, (text, colour, back)
    assert (sum(drawn_in(page)["bg"]) < 150) == (scheme == "dark")
    colours = drawn_in(page)
    for name in ("blue", "orange", "sky", "violet", "gold", "grey", "ink"):
        assert contrast(colours[name], colours["card"]) >= 3, name


def test_the_scheme_may_change_while_the_page_is_open(show: Show, page_file: Path) -> None:
    page = show(page_file, color_scheme="light")
    page.locator("#path canvas").first.wait_for()
    sample = """() => {
      const { width, height } = document.querySelector("#path canvas");
      const { data } = document.querySelector("#path canvas").getContext("2d").getImageData(0, 0, width, height);
      const labels = [];
      for (let i = 0; i < data.length; i += 4) if (data[i + 3] > 240) labels.push(data[i] + data[i + 1] + data[i + 2]);
      return Math.min(...labels);
    }"""
    assert page.evaluate(sample) < 330  # the darkest of what is drawn: text on a light ground
    page.emulate_media(color_scheme="dark")
    page.wait_for_timeout(300)
    page.locator("#path canvas").first.wait_for()
    light = page.evaluate(sample.replace("Math.min", "Math.max").replace("...labels", "...labels.slice(0, 50000)"))
    assert light > 450


@pytest.mark.parametrize("sight", list(_SIGHT))
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_two_lines_differ_in_red_against_green_only(show: Show, page_file: Path, scheme: str, sight: str) -> None:
    page = show(page_file, color_scheme=scheme)
    colours, series = drawn_in(page), page.evaluate("SERIES")
    assert len(series) >= 12  # a grid of all methods has that many
    for (one, dashes), (other, others) in itertools.combinations(series, 2):
        assert dashes != others or apart(colours[one], colours[other], sight) > 25, (one, other)
    # Selected and not; selected in dense; the threshold over the boxes.
    for one, other in (("blue", "grey"), ("blue", "light"), ("orange", "light"), ("orange", "ink")):
        assert apart(colours[one], colours[other], sight) > 25, (one, other)


# -- a phone ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_shows_it_without_scrolling_sideways(show: Show, all_file: Path, width: int) -> None:
    page = show(all_file, width=width, is_mobile=True, has_touch=True, device_scale_factor=2)
    height = page.evaluate("document.documentElement.scrollHeight")
    for y in range(0, height, 700):  # what is drawn when it comes near
        page.evaluate(f"scrollTo(0, {y})")
        page.wait_for_timeout(15)
    page.wait_for_timeout(100)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # Nothing sticks out but what can be scrolled by itself.
    out = page.evaluate(
        """width => [...document.querySelectorAll("main *, header *, footer *")]
          .filter(e => !e.closest(".scroll, pre, .skip, .uplot, svg") && e.getBoundingClientRect().right > width + 0.5)
          .map(e => e.outerHTML.slice(0, 120))""",
        width,
    )
    assert out == []
    # The slider is wide enough to be moved by a finger, and moves.
    slider = page.get_by_role("slider")
    slider.scroll_into_view_if_needed()
    box = slider.bounding_box()
    assert box["width"] > 0.8 * width
    assert box["height"] >= 24
    before = page.locator("#now-epoch").inner_text()
    page.touchscreen.tap(box["x"] + 9, box["y"] + box["height"] / 2)
    assert page.locator("#now-epoch").inner_text() != before


# -- a keyboard ------------------------------------------------------------------------------------------------------


def test_everything_can_be_reached_and_done_with_the_keyboard(show: Show, page_file: Path) -> None:
    page = show(page_file)
    wanted = page.evaluate(
        """() => {
          const all = [...document.querySelectorAll("a[href], button, input, select, summary, [tabindex='0']")];
          // Of radio buttons the one that is on; the arrows do the rest.
          const reached = all.filter(e => e.checkVisibility() && (e.type !== "radio" || e.checked));
          reached.forEach((e, i) => { e.dataset.place = i; });
          return reached.length;
        }"""
    )
    assert wanted > 25
    seen = []
    for _ in range(wanted):
        page.keyboard.press("Tab")
        place, style, width, inside = page.evaluate(
            """() => {
              const e = document.activeElement, s = getComputedStyle(e), box = e.getBoundingClientRect();
              const inside = box.bottom > 0 && box.top < innerHeight;
              return [e.dataset.place ?? e.outerHTML.slice(0, 100), s.outlineStyle, parseFloat(s.outlineWidth), inside];
            }"""
        )
        seen.append(place)
        assert (style, inside) == ("solid", True), (place, seen)
        assert width >= 2
    assert seen == [str(place) for place in range(wanted)]  # each once, in the order of the page
    # The skip link; the axis by arrow; a table by the space bar; a download by Enter.
    page.get_by_role("link", name="Skip to the figures").focus()
    page.keyboard.press("Enter")
    assert page.url.endswith("#main")
    page.get_by_label("epochs").focus()
    page.keyboard.press("ArrowRight")
    assert page.get_by_label("path time").is_checked()
    summary = page.locator("#keep summary")
    summary.focus()
    page.keyboard.press("Space")
    page.locator("#keep .table td").first.wait_for()
    page.keyboard.press("Tab")  # into the table, which the arrows scroll
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Table: Keep ratio by layer"
    page.get_by_role("button", name="Download CSV: Loss").focus()
    with page.expect_download():
        page.keyboard.press("Enter")


def test_figures_have_names_for_those_who_do_not_see_them(show: Show, all_file: Path) -> None:
    page = show(all_file)
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("[role=img], [role=region], button, input, select, nav, section")]
          .filter(e => !e.getAttribute("aria-label") && !e.getAttribute("aria-labelledby") && !e.textContent.trim()
            && !e.closest("label"))
          .map(e => e.outerHTML.slice(0, 100))"""
    )
    assert unnamed == []
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    assert page.locator("h1").count() == 1
    assert page.evaluate("document.documentElement.lang") == "en"
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map(h => +h.tagName[1])")
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
