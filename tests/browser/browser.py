"""A headless Chromium, driven over a pipe by the DevTools protocol: no driver, no package and no port are needed."""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

OPTIONS = (
    "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run", "--mute-audio",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)  # fmt: skip
NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 30.0  # seconds for one answer
LOCAL = ("file:", "data:", "blob:", "about:")


class BrowserError(Exception):
    """The browser did not do what it was told to."""


class Browser:
    """One page at a time. requests, errors: what the open page asked for, and what it complained about."""

    def __init__(self, profile: Path) -> None:
        program = next(filter(None, map(shutil.which, NAMES)), None)
        if program is None:
            raise BrowserError("chromium: not found; install the package chromium")
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        # The protocol's pipes are the descriptors 3 and 4.
        script = f'exec "$@" 3<&{commands} 4>&{answers}'
        arguments = ["bash", "-c", script, "bash", program, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            arguments, pass_fds=(commands, answers), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(commands)
        os.close(answers)
        self._numbers, self._buffer = itertools.count(1), b""
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE)
        os.close(self._commands)
        os.close(self._answers)

    def open(self, page: Path | str, fragment: str = "") -> None:
        """Load a file, or an address of this machine, and wait until it is complete."""
        self._go("about:blank")  # else another fragment would load nothing
        self.requests.clear()
        self.errors.clear()
        self._go((page if isinstance(page, str) else page.resolve().as_uri()) + fragment)

    def _go(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        where = json.dumps(url.partition("#")[0])
        self.wait_for(f"location.href.split('#')[0] === {where} && document.readyState === 'complete'")

    def wait_for(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        end = time.monotonic() + PATIENCE
        while not self.run(expression):
            if time.monotonic() > end:
                raise BrowserError(f"{expression}: not true within {PATIENCE:.0f} s")
            time.sleep(0.01)

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(f"{expression[:80]}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def press(self, key: str, text: str = "") -> None:
        """Press and release a key."""
        code = {"Tab": 9, "Enter": 13, " ": 32, "ArrowRight": 39}.get(key, 0)
        for kind in ("keyDown", "keyUp"):
            typed = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **typed)

    def look(self, width: int, height: int, dark: bool = False) -> None:
        """The size of the window in CSS pixels, and the color scheme."""
        mobile = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)

    def screenshot(self, file: Path) -> None:
        """What the window shows, as PNG."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        """The next message; events are noted."""
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            if not select.select([self._answers], [], [], max(0.0, end - time.monotonic()))[0]:
                raise BrowserError(f"no answer for {PATIENCE:.0f} s")
            data = os.read(self._answers, 1 << 20)
            if not data:
                raise BrowserError("the browser ended")
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, facts: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(facts["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(facts["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and facts["type"] in ("error", "warning"):
            self.errors.append(json.dumps(facts["args"]))
        elif event == "Log.entryAdded" and facts["entry"]["level"] in ("error", "warning"):
            self.errors.append(facts["entry"]["text"])
