"""Take the pictures that the docs show from a running UI: `python docs/screenshots.py [URL] [--into docs/images]`.

Needs `recourse up` with the flights streams at work for a minute or two, Chromium, and the package playwright
(not a part of our dependencies). Writes lineage.png, plots.png and run.png; with `--only health-red` or
`--only health-green` the catalog as it is now, to be taken after a driver was killed, and after its restart.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from urllib.parse import urlencode

from playwright.sync_api import Page, sync_playwright

from orchestration.local_dagster.processes import DagsterClient

JOB = "flights"
TABLE = "carrier_totals"
WIDTH = 1500
HEIGHTS = {"lineage": 1400, "plots": 1300, "run": 900, "health-red": 620, "health-green": 620}
USUAL = ("lineage", "plots", "run")
PATIENCE = 120_000
"""Milliseconds; a busy machine takes a minute to draw the first page."""
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]


def main() -> None:
    """Take every picture."""
    parser = argparse.ArgumentParser(description="Take the pictures that the docs show.")
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:3000")
    parser.add_argument("--into", type=Path, default=Path(__file__).parent / "images")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--only", choices=sorted(HEIGHTS), nargs="+", default=list(USUAL))
    options = parser.parse_args()
    options.into.mkdir(parents=True, exist_ok=True)
    run_id = newest_run(options.url)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.chromium, args=FLAGS)
        page = browser.new_page(viewport={"width": WIDTH, "height": 900})
        shots = {
            "lineage": lambda: lineage(page, options.url),
            "plots": lambda: plots(page, options.url),
            "run": lambda: run(page, options.url, run_id),
            "health-red": lambda: health(page, options.url),
            "health-green": lambda: health(page, options.url),
        }
        for name in options.only:
            page.set_viewport_size({"width": WIDTH, "height": HEIGHTS[name]})
            shots[name]()
            path = options.into / f"{name}.png"
            page.screenshot(path=str(path))
            print(path)
        browser.close()


def newest_run(url: str) -> str:
    """The job's newest run."""
    query = """query($job: String!) { runsOrError(filter: {pipelineName: $job}, limit: 1) {
      ... on Runs { results { runId } } } }"""
    runs = DagsterClient(url).query(query, {"job": JOB})["runsOrError"]["results"]
    if not runs:
        raise SystemExit(f"job {JOB} has no run yet at {url}; wait until the streams are at work")
    return str(runs[0]["runId"])


def lineage(page: Page, url: str) -> None:
    """Topic -> tables, both groups open."""
    groups = ",".join(f"global@global:{group}" for group in ("kafka", JOB))
    page.goto(f"{url}/asset-groups?{urlencode({'expanded': groups})}")
    page.wait_for_selector(f"text={TABLE}", timeout=PATIENCE)
    page.wait_for_timeout(4_000)


def health(page: Page, url: str) -> None:
    """The catalog: every table with its state."""
    page.goto(f"{url}/assets")
    page.wait_for_selector(f"text={TABLE}", timeout=PATIENCE)
    page.wait_for_timeout(8_000)


def plots(page: Page, url: str) -> None:
    """One table's figures over time."""
    page.goto(f"{url}/assets/{TABLE}?view=overview")
    page.wait_for_selector(f"text={TABLE}", timeout=PATIENCE)
    tab = page.get_by_text("Plots", exact=True)
    tab.first.wait_for(timeout=PATIENCE)
    tab.first.click()
    page.wait_for_timeout(4_000)
    tab.first.evaluate("tab => tab.scrollIntoView({block: 'start'})")
    page.wait_for_timeout(1_000)


def run(page: Page, url: str, run_id: str) -> None:
    """A session's page: its events and log."""
    page.goto(f"{url}/runs/{run_id}")
    page.wait_for_selector("text=its log", timeout=PATIENCE)
    page.wait_for_timeout(3_000)


if __name__ == "__main__":
    main()
