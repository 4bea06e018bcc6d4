"""Look at the built site with headless Chromium: what does not fit or load, and pictures of every page.

    python tools/check_docs.py [--site site] [--out output/docs] [--no-screenshots]

Each page is laid out at 1280 and at 390 pixels, the width of a phone. A page fails where it scrolls sideways,
a table, formula or picture is wider than its column, code is cut off on a wide page, a picture is missing,
a number of a table is broken over lines or one of its headings within a word, a heading is empty, or letters
of a table are too small to read. Only Python's standard library and a Chromium (or Chrome) are needed.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

WIDTHS = (1280, 390)
SMALLEST_TEXT = 10.0
"""Pixels of the letters in a table or formula."""
TALLEST = 12000
"""Pixels of a screenshot; what lies below is left out."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

# Lays every page out in a frame of the wanted width, and posts what it finds.
HARNESS = """<!doctype html><meta charset="utf-8"><title>check</title><body style="margin:0">
<iframe id="frame" style="border:0;height:900px"></iframe>
<script>
const job = JSON.parse(decodeURIComponent(location.hash.slice(1)));
const frame = document.getElementById("frame");
const pause = ms => new Promise(done => setTimeout(done, ms));
function load(page, width) {
  return new Promise(done => {
    frame.style.width = width + "px";
    frame.onload = () => done(frame.contentDocument);
    frame.src = "/" + page;
  });
}
function describe(element) {
  const text = element.textContent.trim().replace(/\\s+/g, " ").slice(0, 60);
  return "<" + element.tagName.toLowerCase() + "> " + (text || element.getAttribute("src") || "");
}
function hidden(element) { return element.getClientRects().length === 0; }
function look(page, width, doc) {
  const found = [];
  const say = (element, what) => found.push({page, width, what, where: element ? describe(element) : ""});
  const root = doc.documentElement;
  if (root.scrollWidth > width + 1) say(null, "the page is " + root.scrollWidth + " pixels wide");
  const article = doc.querySelector("article");
  if (!article) { say(null, "no article"); return found; }
  const column = article.getBoundingClientRect();
  for (const each of article.querySelectorAll("table, math, img, svg, .equation, pre, .highlight")) {
    if (hidden(each)) continue;
    const box = each.getBoundingClientRect();
    const size = parseFloat(frame.contentWindow.getComputedStyle(each).fontSize);
    if (each.matches("table, math, img") && box.right > column.right + 2)
      say(each, "ends " + Math.round(box.right - column.right) + " pixels right of its column");
    if (each.matches(".equation, .md-typeset__scrollwrap") && each.scrollWidth > each.clientWidth + 1)
      say(each, "is cut off by " + (each.scrollWidth - each.clientWidth) + " pixels");
    const code = each.matches("pre") ? each.querySelector("code") : null;  // which scrolls
    if (width > 1000 && code && code.scrollWidth > code.clientWidth + 1)
      say(code, "is cut off by " + (code.scrollWidth - code.clientWidth) + " pixels");
    if (each.matches("td, th, math") && size < job.smallest) say(each, "has letters of " + size + " pixels");
    if (each.tagName === "IMG" && !each.naturalWidth) say(each, "is missing");
  }
  for (const cell of article.querySelectorAll("td, th")) {
    const size = parseFloat(frame.contentWindow.getComputedStyle(cell).fontSize);
    if (size < job.smallest) { say(cell, "has letters of " + size + " pixels"); break; }
  }
  const lines = element => {
    const range = doc.createRange();
    range.selectNodeContents(element);
    return new Set([...range.getClientRects()].map(box => Math.round(box.top / 4))).size;
  };
  for (const cell of article.querySelectorAll("td")) {
    const isNumber = /^[-+]?[\\d.,]+\\S*$/.test(cell.textContent.trim()) && !cell.querySelector("math, sup");
    if (!hidden(cell) && isNumber && lines(cell) > 1) say(cell, "is a number broken over lines");
  }
  for (const head of article.querySelectorAll("th")) {
    const words = head.textContent.trim().split(/[\\s-]+/).length;
    if (!hidden(head) && !head.querySelector("code, math") && lines(head) > words)
      say(head, "is broken within a word");
  }
  for (const quote of page.startsWith("api/") ? article.querySelectorAll("blockquote") : [])
    say(quote, "is a block quote");
  for (const empty of article.querySelectorAll("h2, h3, th, td:only-child"))
    if (!empty.textContent.trim()) say(empty, "is empty");
  return found;
}
(async () => {
  const found = [], heights = {};
  for (const width of job.widths) for (const page of job.pages) {
    const doc = await load(page, width);
    await doc.fonts.ready;
    for (const image of doc.images) { image.loading = "eager"; }
    await Promise.all([...doc.images].map(image => image.decode().catch(() => 0)));
    await pause(20);
    found.push(...look(page, width, doc));
    heights[width + " " + page] = doc.documentElement.scrollHeight;
  }
  await fetch("/__report__", {method: "POST", body: JSON.stringify({found, heights})});
})().catch(error => fetch("/__report__", {method: "POST", body: JSON.stringify({error: String(error)})}));
</script>"""

# One page in a frame, for its picture.
FRAME = (
    '<!doctype html><body style="margin:0">'
    '<iframe src="/{page}" style="border:0;width:{width}px;height:{height}px">'
)


class Handler(http.server.SimpleHTTPRequestHandler):
    """The site, the two pages above, and the report of the first."""

    reports: queue.Queue[dict[str, Any]]

    def do_GET(self) -> None:
        if self.path.startswith("/__check__"):
            self._answer(HARNESS)
        elif self.path.startswith("/__frame__"):
            self._answer(self.frame_of(self.path))
        else:
            super().do_GET()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.reports.put(json.loads(body))
        self._answer("")

    def frame_of(self, path: str) -> str:
        width, height, page = path.removeprefix("/__frame__/").split("/", 2)
        return FRAME.format(page=page, width=int(width), height=int(height))

    def _answer(self, text: str) -> None:
        data = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def browser() -> str | None:
    """The browser's path: $CHROMIUM, or the first that is installed."""
    named = os.environ.get("CHROMIUM")
    return shutil.which(named) if named else next(filter(None, map(shutil.which, BROWSERS)), None)


@contextmanager
def served(site: Path) -> Iterator[tuple[str, queue.Queue[dict[str, Any]]]]:
    """The site at an address of this machine, and the reports posted to it."""
    reports: queue.Queue[dict[str, Any]] = queue.Queue()
    handler = type("SiteHandler", (Handler,), {"reports": reports})
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(handler, directory=str(site))
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", reports
        finally:
            server.shutdown()


def command(path: str, profile: str, *arguments: str) -> list[str]:
    """A headless browser; without its sandbox, which root cannot have."""
    sandbox = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    return [
        path, "--headless=new", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
        "--disable-extensions", "--disable-dev-shm-usage", f"--user-data-dir={profile}", *sandbox, *arguments,
    ]  # fmt: skip


def inspect(path: str, site: Path, pages: list[str], timeout: float = 180) -> dict[str, Any]:
    """What the browser finds wrong with the pages, and how tall they are."""
    job = {"pages": pages, "widths": WIDTHS, "smallest": SMALLEST_TEXT}
    with (
        served(site) as (address, reports),
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
    ):
        url = f"{address}/__check__#{quote(json.dumps(job))}"
        process = subprocess.Popen(
            command(path, profile, "--window-size=1400,1000", url),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            report = reports.get(timeout=timeout)
        except queue.Empty:
            raise SystemExit(f"{path} did not report within {timeout:.0f} s") from None
        finally:
            process.terminate()
            process.wait()
    if "error" in report:
        raise SystemExit(report["error"])
    return report


def screenshots(path: str, site: Path, heights: dict[str, int], out: Path) -> None:
    """A picture of every page at every width, as NAME-WIDTH.png."""
    out.mkdir(parents=True, exist_ok=True)
    with served(site) as (address, _), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for key, height in heights.items():
            width, page = key.split(" ", 1)
            height = min(height, TALLEST)
            name = page.removesuffix("index.html").strip("/").replace("/", "-") or "index"
            picture = out / f"{name}-{width}.png"
            subprocess.run(
                command(
                    path,
                    profile,
                    f"--window-size={max(int(width), 500)},{height}",
                    f"--screenshot={picture.resolve()}",
                    "--virtual-time-budget=4000",
                    f"{address}/__frame__/{width}/{height}/{page}",
                ),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                check=True,
                timeout=120,
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--site", type=Path, default=Path("site"))
    parser.add_argument("--out", type=Path, default=Path("output/docs"), help="where the pictures go")
    parser.add_argument("--no-screenshots", action="store_true", help="only check")
    parser.add_argument("--page", action="append", help="only these pages, such as speed/index.html")
    arguments = parser.parse_args()
    path = browser()
    if path is None:
        print(
            "no Chromium: install one (Debian: apt-get install chromium), or name it in $CHROMIUM",
            file=sys.stderr,
        )
        return 2
    pages = arguments.page or sorted(
        file.relative_to(arguments.site).as_posix()
        for file in arguments.site.rglob("*.html")
        if file.name == "index.html"
    )
    if not pages:
        print(f"no page in {arguments.site}: `make docs` builds them", file=sys.stderr)
        return 2
    report = inspect(path, arguments.site, pages)
    for each in report["found"]:
        print(f"{each['page']} at {each['width']}: {each['where']} {each['what']}")
    if not arguments.no_screenshots:
        screenshots(path, arguments.site, report["heights"], arguments.out)
        print(f"pictures of {len(report['heights'])} layouts in {arguments.out}")
    print(f"{len(pages)} pages at {' and '.join(map(str, WIDTHS))} pixels: {len(report['found'])} faults")
    return 1 if report["found"] else 0


if __name__ == "__main__":
    sys.exit(main())
