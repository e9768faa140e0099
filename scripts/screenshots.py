"""Takes the pictures of docs/images from a real run: the fleet page, a request's timeline, and `kvrelay top`.

python scripts/screenshots.py [--chromium PATH]

Starts the demo stack with two workers of each role on free ports, sends it a load with `kvrelay bench`, and looks at it
meanwhile. Needs a Chromium, and pngquant to make the pictures small.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from io import StringIO
from pathlib import Path

import httpx
from rich.console import Console

from kvrelay.cli.top import ask, view
from kvrelay.ports import HeldPort

IMAGES = Path(__file__).parents[1] / "docs" / "images"
START_S = 300.0
LOOKS_MS = 20_000  # of the browser's own time: several looks of the page at the fleet
LOAD = ("--rate", "5", "--requests", "400", "--prompt-tokens", "400", "--output-tokens", "48", "--prefix-tokens", "200")


def find_chromium() -> str | None:
    """The first browser on PATH that takes Chromium's flags."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


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
        stack = subprocess.Popen([*kvrelay, "up", "--prefill", "2", "--decode", "2", "--port", str(held.port)])
        try:
            _wait_until_ready(url, stack)
            load = subprocess.Popen([*kvrelay, "bench", url, *LOAD], stdout=subprocess.DEVNULL)
            try:
                _take_pictures(url, chromium, load)
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


def _take_pictures(url: str, chromium: str, load: subprocess.Popen[bytes]) -> None:
    """Once there is something to see. The timeline is one of the last requests, since the list does not move then."""
    finished: list[str] = []
    while len(finished) < 60:
        time.sleep(0.5)
        finished = _finished(url)
    _photograph(chromium, f"{url}/dashboard", IMAGES / "dashboard.png", "1280,960")
    console = Console(record=True, width=120, file=StringIO())
    console.print(view(ask(url)))
    picture = console.export_svg(title="kvrelay top")
    # The font would be fetched from elsewhere; a monospaced one that is there does as well.
    (IMAGES / "top.svg").write_text(re.sub(r"@font-face \{.*?\}\n?", "", picture, flags=re.DOTALL), encoding="utf-8")
    load.wait()
    _photograph(chromium, f"{url}/dashboard#request={_finished(url)[3]}", IMAGES / "timeline.png", "1280,1900")


def _finished(url: str) -> list[str]:
    """Ids of the latest finished requests, newest first."""
    requests = httpx.get(f"{url}/requests", timeout=60).raise_for_status().json()["requests"]
    return [each["request_id"] for each in requests if each["state"] == "finished"]


def _photograph(chromium: str, url: str, path: Path, size: str) -> None:
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                *(chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                *(f"--user-data-dir={profile}", f"--window-size={size}", f"--virtual-time-budget={LOOKS_MS}"),
                *(f"--screenshot={path}", url),
            ],
            check=True,
            capture_output=True,
            timeout=300,
        )
    if pngquant := shutil.which("pngquant"):
        subprocess.run([pngquant, "--force", "--output", path, "64", "--", path], check=True)


if __name__ == "__main__":
    raise SystemExit(main())
