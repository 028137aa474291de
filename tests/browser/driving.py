"""A headless Chromium, started for tests and for pictures."""

from __future__ import annotations

import os
import shutil
from typing import Any

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = (
    "Chromium and chromedriver are not on PATH (Debian: apt install chromium chromium-driver)."
)


def missing() -> str | None:
    """Say what to install, if there is no browser."""
    return None if _browser() and shutil.which("chromedriver") else MISSING


def _browser() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


def start(*, width: int = 1280, height: int = 1000) -> Chrome:
    """Start a browser that keeps what its console says; who starts it quits it."""
    options = ChromeOptions()
    options.binary_location = _browser() or ""
    options.add_argument("--headless=new")
    options.add_argument(f"--window-size={width},{height}")
    options.add_argument("--disable-dev-shm-usage")  # small in containers
    options.add_argument("--force-color-profile=srgb")
    options.add_argument("--hide-scrollbars")
    options.add_argument("--lang=en")
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # Chromium refuses root otherwise
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options, Service(shutil.which("chromedriver")))
    driver.set_page_load_timeout(60)
    return driver


def log_in(driver: Chrome, root: str, session: str) -> None:
    """Give the browser a session of the site at ``root``."""
    driver.get(f"{root}/static/admin/img/icon-yes.svg")  # any page of the site, for the cookie
    driver.delete_all_cookies()
    driver.add_cookie({"name": "sessionid", "value": session})


def prefer(driver: Chrome, scheme: str) -> None:
    """Have the browser ask for light or dark pages."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def run_scripts(driver: Chrome, allowed: bool) -> None:
    """Let pages run their scripts, or keep them from it."""
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": not allowed})


def complaints(driver: Chrome) -> list[str]:
    """Return what the console has complained of since the last look."""
    entries: list[dict[str, Any]] = driver.get_log("browser")  # type: ignore[no-untyped-call]
    said = [each["message"] for each in entries if each["level"] in ("SEVERE", "WARNING")]
    return [each for each in said if "/favicon.ico" not in each]  # no page asks for one


def show(driver: Chrome, height: int | None = None) -> None:
    """Make the window that high for a picture; without a height, as high as the page."""
    height = height or driver.execute_script("return document.documentElement.scrollHeight")
    width = driver.get_window_size()["width"]
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": int(height), "deviceScaleFactor": 1, "mobile": False},
    )


def texts(driver: Chrome, selector: str) -> list[str]:
    """Return the visible texts of all that match, at one moment: a page may renew itself."""
    read = "return [...document.querySelectorAll(arguments[0])].map((each) => each.innerText)"
    return list(driver.execute_script(read, selector))
