"""Chromium without a window, for tests of pages; nothing is fetched."""

import shutil
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
FLAGS = "headless=new no-sandbox disable-gpu disable-quic no-first-run disable-background-networking"


def chromium(profile: Path) -> Any:
    """Return a driver of Chromium with a profile in this folder; it logs what pages write to the console."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*FLAGS.split(), f"user-data-dir={profile}"]:
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
