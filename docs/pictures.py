"""The pictures of these pages, taken anew: `make demo && .venv/bin/python docs/pictures.py` (needs chromium)."""

import io
import os
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

PAGE = Path("runs/digits.html")
FOLDER = Path(__file__).parent / "pictures"
# name: width and height of the window, the scheme of colours, and how many points before the end of the path.
TAKEN = {"demo": (1200, 1130, "light", 8), "demo-dark": (1200, 1130, "dark", 0), "demo-phone": (390, 844, "light", 8)}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    program = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name, (width, height, scheme, back) in TAKEN.items():
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.goto(PAGE.resolve().as_uri())
            page.get_by_role("slider").focus()
            for _ in range(back):
                page.keyboard.press("ArrowLeft")
            page.evaluate("document.activeElement.blur()")
            page.wait_for_timeout(1000)
            picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            # Few colours are enough for text and lines, and a third of the bytes.
            picture.quantize(96).save(FOLDER / f"{name}.png", optimize=True)
        browser.close()


if __name__ == "__main__":
    main()
