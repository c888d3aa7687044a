"""Chromium without a window."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from tests.support.live_view_page import errors_of


@pytest.fixture(scope="session")
def chromium(_programs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """Chromium without a window. The fixture fails, with a remedy, if Chromium is missing."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if found is None or driver is None:
        pytest.fail("Chromium or chromedriver is missing: run tools/ensure_chromium.sh")
    options = webdriver.ChromeOptions()
    options.binary_location = found
    for argument in (
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *("--disable-dev-shm-usage", "--hide-scrollbars", "--lang=en-US"),
        f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options=options, service=Service(driver))
    made.set_page_load_timeout(120)
    try:
        yield made
    finally:
        made.quit()


@pytest.fixture
def browser(chromium: webdriver.Chrome) -> webdriver.Chrome:
    """Chromium without the former test's page, which polls a server that is gone, and without its errors."""
    chromium.get("about:blank")
    errors_of(chromium)
    return chromium
