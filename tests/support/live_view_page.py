"""The live view's page in Chromium."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException

from tests.support.waiting import until

# Pictures for the documentation show curves that have gone on for a while.
DRAWS = os.environ.get("KAFKA_CHUNKED_SCREENSHOTS") == "1"


def errors_of(browser: webdriver.Chrome) -> list[str]:
    return [
        one["message"]
        for one in browser.execute("getLog", {"type": "browser"})["value"]
        if one["level"] == "SEVERE"
    ]


class Page:
    def __init__(self, browser: webdriver.Chrome, url: str) -> None:
        self.browser = browser
        # The test before may have left it as narrow as a phone, where columns are hidden.
        self.look(1200, dark=False)
        browser.get(url)
        self.eventually(lambda: self.text("status") in ("live", "recorded"))

    def text(self, element: str) -> str:
        try:
            return str(self.browser.find_element("id", element).text)
        except StaleElementReferenceException:
            return ""

    def eventually(self, condition: Callable[[], object], within_s: float = 60.0) -> None:
        until(condition, lambda: self.browser.find_element("tag name", "body").text, within_s, poll_s=0.2)

    def settle(self, for_pictures_s: float, else_s: float = 0.0) -> None:
        time.sleep(for_pictures_s if DRAWS else else_s)

    def rows(self) -> int:
        return int(re.findall(r"Rows acknowledged\n([\d,]+)", self.text("tiles"))[0].replace(",", ""))

    def look(self, width: int, *, dark: bool) -> None:
        self.browser.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]},
        )
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def picture(self, path: Path, width: int = 1200, *, dark: bool = False) -> None:
        """The whole page. Nothing may stick out of it to the right."""
        self.look(width, dark=dark)
        self.settle(1.2, 0.2)
        size = "return [document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
        wide, high = self.browser.execute_script(size)
        assert wide <= width
        tables = (
            "return [...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth + 1)"
        )
        assert not self.browser.execute_script(tables + ".map(e => e.textContent)")
        metrics = {"width": width, "height": high, "deviceScaleFactor": 1, "mobile": width < 600}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.settle(0.3)
        assert self.browser.save_screenshot(str(path))

    def errors(self) -> list[str]:
        return errors_of(self.browser)
