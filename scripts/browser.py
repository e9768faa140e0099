"""A headless Chromium that is driven over its DevTools protocol, for pictures of pages and for tests of them.

Messages are JSON that ends with a zero byte. The browser reads commands from file descriptor 3 and writes answers to 4.
Pages run in real time, so what they ask of a server is answered as for a user.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

ANSWER_S = 120.0
"""For one command. A browser that starts on busy cores takes some seconds for its first."""
LOOK_S = 0.1


def find_chromium() -> str | None:
    """The first browser on PATH that takes Chromium's flags."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


class Browser:
    """One page. A context manager that starts and ends the browser, whose profile is temporary.

    Every method raises TimeoutError if the browser does not answer, EOFError if it has ended, and RuntimeError if it
    refuses the command.
    """

    def __init__(self, chromium: str, width: int = 1280, height: int = 960) -> None:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        read_commands, self._commands = os.pipe()
        self._answers, write_answers = os.pipe()
        # Above the numbers that the redirections below assign, so that none overwrites one that is still needed.
        theirs = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 10) for each in (read_commands, write_answers)]
        os.close(read_commands)
        os.close(write_answers)
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
        command = ["bash", "-c", f'exec "$@" 3<&{theirs[0]} 4>&{theirs[1]}', "bash"]
        command += [chromium, *flags, f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(
            command, pass_fds=theirs, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for each in theirs:
            os.close(each)
        self._received = b""
        self._last_id = 0
        self._session: dict[str, str] = {}
        try:
            target = self._command("Target.createTarget", url="about:blank")["targetId"]
            attached = self._command("Target.attachToTarget", targetId=target, flatten=True)
            self._session = {"sessionId": attached["sessionId"]}
            self.resize(width, height)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def resize(self, width: int, height: int) -> None:
        """Sets the size of the page, and of its pictures, in pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._command("Emulation.setDeviceMetricsOverride", **size)

    def open(self, url: str) -> None:
        """Goes to another page, and waits until it is loaded and its scripts have run once."""
        self.evaluate("window.isPageBefore = true")
        answer = self._command("Page.navigate", url=url)
        if "errorText" in answer:
            raise RuntimeError(f"{url}: {answer['errorText']}")
        self.wait_for("!window.isPageBefore && document.readyState === 'complete'", ANSWER_S)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page, which JSON must be able to carry."""
        answer = self._command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, condition: str, timeout_s: float) -> None:
        """Until a JavaScript expression is true. Raises TimeoutError with the page's text."""
        deadline = time.monotonic() + timeout_s
        while not self.evaluate(f"Boolean({condition})"):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{condition} is not true of:\n{self.evaluate('document.body.innerText')}")
            time.sleep(LOOK_S)

    def markup(self) -> str:
        """The elements of the page as they are now."""
        return str(self.evaluate("document.documentElement.outerHTML"))

    def photograph(self, path: Path) -> None:
        """Writes the page as PNG."""
        path.write_bytes(base64.b64decode(self._command("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        """Ends the browser. Harmless if it has ended."""
        try:
            self._session = {}
            self._command("Browser.close")
            self._process.wait(ANSWER_S)
        except (OSError, EOFError, RuntimeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        for each in (self._commands, self._answers):
            os.close(each)
        self._profile.cleanup()

    def _command(self, method: str, **params: Any) -> dict[str, Any]:
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params, **self._session}
        unsent = json.dumps(message).encode() + b"\0"
        while unsent:
            unsent = unsent[os.write(self._commands, unsent) :]
        deadline = time.monotonic() + ANSWER_S
        while (answer := self._receive(deadline)).get("id") != self._last_id:
            pass  # an event, which nothing here waits for
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._answers, 1 << 20)
            if not data:
                raise EOFError("the browser has ended")
            self._received += data
        text, self._received = self._received.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        return message
