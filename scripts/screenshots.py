"""Takes the pictures of docs/images from a real run: the fleet page, a request's timeline, and `kvrelay top`.

python -m scripts.screenshots [--chromium PATH]

Starts the demo stack with two workers of each role on a free port, sends it a load with `kvrelay bench`, and takes the
pictures after about a minute of it, which is what the charts of the page show. Needs a Chromium, and pngquant to make
the pictures small.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import httpx
from rich.console import Console

from kvrelay.cli.top import fleet_of, view
from kvrelay.process import HeldPort
from scripts.browser import Browser, find_chromium

IMAGES = Path(__file__).parents[1] / "docs" / "images"
START_S = 300.0
LOAD_S = 75
MARGIN_PX = 60  # below the timeline, so that a picture shows what it stands in
# A prompt goes to prefill whatever decode has free, and the pools are small enough to show what they hold.
STACK = ("--prefill", "2", "--decode", "2", "--local-prefill-tokens", "0", "--kv-memory-bytes", "32MiB")
LENGTHS = ("--prompt-tokens", "400", "--output-tokens", "96", "--prefix-tokens", "200")
LOAD = ("--rate", "3", "--duration", "5min", *LENGTHS)


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chromium", default=find_chromium(), help="(default: the first one on PATH)")
    chromium = parser.parse_args().chromium
    if chromium is None:
        parser.error("no Chromium on PATH: name one with --chromium")
    kvrelay = [sys.executable, "-m", "kvrelay.cli.main"]
    with HeldPort() as held:
        url = f"http://127.0.0.1:{held.port}"
        stack = subprocess.Popen([*kvrelay, "up", *STACK, "--port", str(held.port)])
        try:
            _wait_until_ready(url, stack)
            load = subprocess.Popen([*kvrelay, "bench", url, *LOAD], stdout=subprocess.DEVNULL)
            try:
                with Browser(chromium) as browser:
                    _take_pictures(url, browser)
            finally:
                load.terminate()
                load.wait()
        finally:
            stack.terminate()
            stack.wait()
    return 0


def _wait_until_ready(url: str, stack: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and stack.poll() is None:
        try:
            if httpx.get(f"{url}/ready").is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise SystemExit("the stack did not become ready")


def _take_pictures(url: str, browser: Browser) -> None:
    browser.open(f"{url}/dashboard")
    shown_ms = "(points => points.at(-1)[0] - points[0][0])(charted.get('running'))"
    browser.wait_for(f"charted.has('running') && {shown_ms} > {1000 * LOAD_S}", 3 * LOAD_S)
    _photograph(browser, IMAGES / "dashboard.png")
    console = Console(record=True, width=120, file=StringIO())
    console.print(view(fleet_of(url)))
    picture = console.export_svg(title="kvrelay top")
    # The font would be fetched from elsewhere; a monospaced one that is there does as well.
    (IMAGES / "top.svg").write_text(re.sub(r"@font-face \{.*?\}\n?", "", picture, flags=re.DOTALL), encoding="utf-8")
    browser.evaluate(f"location.hash = 'request={_newest_finished(url)}'")
    browser.wait_for("document.querySelector('td.timeline #events tr')", START_S)
    end = "document.getElementById('timeline').getBoundingClientRect().bottom + scrollY"
    browser.resize(1280, int(browser.evaluate(end)) + MARGIN_PX)
    _photograph(browser, IMAGES / "timeline.png")


def _newest_finished(url: str) -> str:
    """The id of the request that finished last, which stays in the page's list for longest."""
    requests = httpx.get(f"{url}/requests", timeout=60).raise_for_status().json()["requests"]
    return str(next(each["request_id"] for each in requests if each["state"] == "finished"))


def _photograph(browser: Browser, path: Path) -> None:
    browser.photograph(path)
    if pngquant := shutil.which("pngquant"):
        subprocess.run([pngquant, "--force", "--output", path, "64", "--", path], check=True)


if __name__ == "__main__":
    raise SystemExit(main())
