"""Run docs/tour.ipynb, and draw docs/tour.png from it.

    python tools/tour.py

Needs the packages of `make test`, and Pillow and Chromium for the picture.
"""

import io
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from playwright.sync_api import sync_playwright

DOCS = Path(__file__).parents[1] / "docs"
PICTURE = ("tour-0", "tour-1", "tour-4", "tour-5")  # cells: the map, and the claims


def run(folder: Path) -> nbformat.NotebookNode:
    """Run the notebook in `folder`. Its kernel listens on files instead of network ports."""
    notebook = nbformat.read(DOCS / "tour.ipynb", as_version=4)
    manager = AsyncKernelManager(
        kernel_name="python3", transport="ipc", ip=str(folder / "kernel")
    )
    client = NotebookClient(notebook, km=manager, timeout=600, coalesce_streams=True)
    client.execute(cwd=str(folder))
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"]}
    for cell in notebook.cells:
        cell.metadata = {}  # without times
        if "outputs" in cell:  # without warnings of libraries
            cell.outputs = [x for x in cell.outputs if x.get("name") != "stderr"]
    return notebook


def html(notebook: nbformat.NotebookNode, theme: str = "light") -> str:
    return HTMLExporter(theme=theme).from_notebook_node(notebook)[0]


def picture(page: str) -> bytes:
    """PNG of a page, in 256 colours."""
    from PIL import Image

    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        view = browser.new_page(viewport={"width": 1000, "height": 9})
        view.set_content(page)
        screenshot = view.screenshot(full_page=True)
        drawn = Image.open(io.BytesIO(screenshot))
    colours = drawn.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE)
    small = io.BytesIO()
    colours.save(small, "png", optimize=True)
    return small.getvalue()


def main() -> None:
    with TemporaryDirectory() as folder:
        notebook = run(Path(folder))
    nbformat.write(notebook, DOCS / "tour.ipynb")
    notebook.cells = [cell for cell in notebook.cells if cell.id in PICTURE]
    page = html(notebook)
    (DOCS / "tour.png").write_bytes(picture(page))


if __name__ == "__main__":
    main()
