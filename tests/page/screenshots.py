"""Take screenshots of the service's page for the documentation, by headless Chromium on a copy of a folder of runs.

    python tests/page/screenshots.py runs/demo --out docs

Writes service-runs.png, service-run.png, service-dark.png, service-job.png and service-phone.png.
"""

import argparse
import json
import re
import shutil
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from page_service import asked, serving
from page_watched import BROWSERS, FLAGS
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

SLOW = 600_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="folder of runs, attacked and scored; it is copied")
    parser.add_argument("--out", type=Path, default=Path("docs"))
    arguments = parser.parse_args()
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        root = Path(folder) / "runs"
        shutil.copytree(arguments.root, root)
        browser = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        with serving(root, "--truth", "own", "--workers", "1") as address:
            shoot(browser, address, arguments.out)
        browser.close()


def shoot(browser: Browser, address: str, out: Path) -> None:
    """Take all screenshots, of the run with most leakage and of its first cell with most leakage."""
    run = max(asked(address, "recordings")["items"], key=lambda one: measure_leak(address, one["id"]))["id"]
    cell = max(asked(address, f"recordings/{run}/grid")["cells"], key=lambda one: (one["leak"] or 0.0, -one["round"]))
    place = f"#/run/{run}?cell={cell['round']}@{cell['client']}"
    take(open_page(browser, f"{address}#/"), out / "service-runs.png")
    take(open_page(browser, address + place), out / "service-run.png")
    take(open_page(browser, address + place, color_scheme="dark"), out / "service-dark.png")
    take(open_page(browser, address + place, width=390, height=900, device_scale_factor=2), out / "service-phone.png")
    spec = {
        "recording": run,
        "attack": "inverting_gradients",
        "rounds": str(cell["round"]),
        "arguments": {"steps": 6000, "signed": False, "tv": 1e-3},
    }
    job = post(address, "jobs", spec)
    page = open_page(browser, f"{address}#/job/{job['id']}", settle=False)
    expect(page.get_by_role("img", name=re.compile("^Intermediate image")).first).to_be_visible(timeout=SLOW)
    expect(page.locator("figure.chart")).to_be_visible(timeout=SLOW)
    page.wait_for_timeout(15_000)
    take(page, out / "service-job.png")
    post(address, f"jobs/{job['id']}/cancel", {})


def measure_leak(address: str, run: str) -> float:
    return sum(one["leak"] or 0.0 for one in asked(address, f"recordings/{run}/grid")["cells"])


def open_page(
    browser: Browser, address: str, *, width: int = 1280, height: int = 900, settle: bool = True, **options: Any
) -> Page:
    page = browser.new_context(viewport={"width": width, "height": height}, **options).new_page()
    page.goto(address)
    if settle:
        expect(page.locator("main :is(h1, h3)").first).to_be_visible(timeout=SLOW)
        expect(page.get_by_text("Loading.").locator("visible=true")).to_have_count(0, timeout=SLOW)
        page.wait_for_load_state("load")
        page.wait_for_timeout(2500)
    return page


def take(page: Page, path: Path) -> None:
    """Save a screenshot of the window, and close the page."""
    page.screenshot(path=path)
    with Image.open(path) as picture:
        picture.convert("RGB").save(path, optimize=True)
    print(f"{path}  {path.stat().st_size / 1000:.0f} kB")
    page.context.close()


def post(address: str, path: str, body: Any) -> Any:
    request = urllib.request.Request(f"{address}api/v1/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


if __name__ == "__main__":
    main()
