"""Take the pictures of the gallery, and write reports/index.html.

    python tools/gallery.py [FOLDER]

Each folder with a page gets picture.webp: the first figure of its page, drawn by the page in
Chromium. Pages without figures, such as claims, need no picture. Needs playwright and Chromium.
"""

import base64
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from ropelens.report import write_index
from ropelens.report.gallery_picture import PICTURE

REPORTS = Path(__file__).parents[1] / "reports"
WINDOW = {"width": 520, "height": 800}  # narrow, so that words are large in the picture
WIDTH = 420  # pixels of a picture
TALLEST = 1.0  # its height over its width; a taller figure is drawn with less height
DRAWN = ".js-plotly-plot .main-svg"
TAKE = """async ([pixels, tallest]) => {
  const plots = [...document.querySelectorAll(".js-plotly-plot")];
  const plot = plots.find((one) => one.offsetWidth > 0);
  const width = plot.offsetWidth;
  const size = { width, height: Math.min(plot.offsetHeight, tallest * width) };
  const image = new Image();
  image.src = await Plotly.toImage(plot, { format: "png", scale: 1, ...size });
  await image.decode();
  const canvas = document.createElement("canvas");
  canvas.width = pixels;
  canvas.height = Math.round((pixels * size.height) / width);
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/webp", 0.7);
}"""


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else REPORTS
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=chromium, args=["--no-sandbox"]
        )
        for page in sorted(folder.glob("*/*/index.html")):
            if has_figures(page):
                (page.parent / PICTURE).write_bytes(picture(browser, page))
        browser.close()
    print(write_index(folder))


def has_figures(page: Path) -> bool:
    return 'id="plotly"' in page.read_text(encoding="utf-8")


def picture(browser: Browser, page: Path) -> bytes:
    """The first figure of a page as WebP."""
    tab = browser.new_page(viewport=WINDOW, color_scheme="light")
    tab.goto(page.absolute().as_uri())
    tab.wait_for_selector(DRAWN)
    address = tab.evaluate(TAKE, [WIDTH, TALLEST])
    tab.close()
    return base64.b64decode(address.partition(",")[2])


if __name__ == "__main__":
    main()
