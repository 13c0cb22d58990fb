"""`python docs/screenshots.py`: the pictures in reports.md, from a report on a pipelined run of the MNIST tutorial.

Needs an installed Chromium. With the folder of a report as its argument, it takes the pictures of that one.
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile

from playwright.sync_api import sync_playwright

DOCS = pathlib.Path(__file__).resolve().parent
EXAMPLE = DOCS.parent / "examples" / "keras_tutorial" / "completed_example" / "main.py"
OPTIONS = ["--use-ipu", "--pipelining", "--steps-per-execution", "16", "--samples", "6400", "--test-samples", "640"]


def take(folder: pathlib.Path) -> None:
    """Take the pictures of the report in a folder."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        page = browser.new_page(viewport={"width": 1180, "height": 1000}, color_scheme="light")
        page.goto((folder / "report.html").as_uri())
        page.screenshot(path=DOCS / "report.png")
        page.get_by_role("heading", name="Pipeline").first.evaluate("one => scrollTo(0, one.offsetTop - 16)")
        page.screenshot(path=DOCS / "report-pipeline.png")
        browser.close()


if __name__ == "__main__":
    if sys.argv[1:]:
        take(pathlib.Path(sys.argv[1]).resolve())
    else:
        with tempfile.TemporaryDirectory() as out:
            subprocess.run([sys.executable, str(EXAMPLE), *OPTIONS, "--profile", out], check=True)
            take(pathlib.Path(out))
