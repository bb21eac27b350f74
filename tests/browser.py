"""Headless Chromium, for the tests of pages and of JupyterLab."""

import itertools
import json
import os
import subprocess
import time

import pytest

CONSOLE = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")


class Browser:
    """Headless Chromium, told what to do through a pipe in its own tools' protocol."""

    def __init__(self, chromium, folder):
        (theirs, self.to), (self.by, own) = os.pipe(), os.pipe()
        options = "--headless --no-sandbox --disable-gpu --remote-debugging-pipe".split()
        shell = ["bash", "-c", f'exec "$0" "$@" 3<&{theirs} 4>&{own}', chromium, *options]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        command = [*shell, f"--user-data-dir={folder}"]
        self.process = subprocess.Popen(command, pass_fds=(theirs, own), **quiet)
        os.close(theirs), os.close(own)
        self.count, self.session, self.rest, self.told = itertools.count(1), {}, b"", []
        target = self("Target.createTarget", url="about:blank")
        attached = self("Target.attachToTarget", **target, flatten=True)
        self.session = {"sessionId": attached["sessionId"]}
        self("Log.enable"), self("Runtime.enable")

    def __call__(self, method, **params):
        message = {"id": next(self.count), "method": method, "params": params, **self.session}
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                self.rest += os.read(self.by, 1 << 16) or pytest.fail("the browser ended")
            line, _, self.rest = self.rest.partition(b"\0")
            if (answer := json.loads(line)).get("id") == message["id"]:
                return answer["result"]
            if answer.get("method") in CONSOLE:
                self.told.append(answer["params"])

    def js(self, expression):
        options = {"awaitPromise": True, "returnByValue": True}
        result = self("Runtime.evaluate", expression=expression, **options)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def text(self, name):
        return self.js(f"document.getElementById('{name}').textContent")

    def drag(self, element, start, end):
        """Press the mouse at one share of an element's width, release it at another."""
        box = f"document.querySelector('{element}').getBoundingClientRect()"
        x, y, width, height = (self.js(f"{box}.{side}") for side in ("x", "y", "width", "height"))
        for kind, share in (("Pressed", start), ("Moved", end), ("Released", end)):
            held = {"button": "left", "buttons": int(kind != "Released"), "clickCount": 1}
            where = {"x": x + share * width, "y": y + height / 2}
            self("Input.dispatchMouseEvent", type=f"mouse{kind}", **where, **held)

    def press(self, key):
        code = {"End": 35, "Home": 36, "ArrowLeft": 37}[key]
        for kind in ("rawKeyDown", "keyUp"):
            self("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code)

    def open(self, text, file, width=1200, scheme="light"):
        """Show a page, whose console has to stay empty."""
        file.write_text(text)
        self.told.clear()
        scheme = {"name": "prefers-color-scheme", "value": scheme}
        self("Emulation.setEmulatedMedia", features=[scheme])
        screen = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
        self("Emulation.setDeviceMetricsOverride", **screen)
        self("Page.navigate", url=file.as_uri())
        end = time.monotonic() + 60
        while not self.js("location.protocol == 'file:' && document.readyState == 'complete'"):
            assert time.monotonic() < end, "the page did not load"
            time.sleep(0.1)
        assert not self.told, f"{file.name}: {self.told}"
