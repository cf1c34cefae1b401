"""A Chromium for tests of pages."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.serving.harness import eventually

_BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
_DRIVER = shutil.which("chromedriver")
_FLAGS = (
    "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync",
    "disable-background-networking", "disable-component-update", "disable-dev-shm-usage",
)  # fmt: skip

needs_chromium = pytest.mark.skipif(
    _BROWSER is None or _DRIVER is None,
    reason="there is no Chromium here with its driver (apt-get install chromium chromium-driver)",
)


class Page:
    """A tab of a browser."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def run(self, script: str, *arguments: object) -> Any:
        """What a function's body returns in the page."""
        return self.driver.execute_script(script, *arguments)

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", selector))

    def one(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        return str(self.one(selector).text)

    def type(self, selector: str, text: str) -> None:
        box = self.one(selector)
        box.clear()
        box.send_keys(text)

    def click(self, selector: str) -> None:
        self.one(selector).click()

    def until(self, condition: Callable[[], Any], timeout: float = 60.0) -> Any:
        return eventually(condition, timeout)

    def size(self, width: int, height: int) -> None:
        """The window's, of a telephone where it is narrow."""
        mobile = width < 600
        sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", sizes)

    def scheme(self, name: str) -> None:
        """`light` or `dark`, as the user prefers."""
        feature = {"name": "prefers-color-scheme", "value": name}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def complaints(self) -> list[str]:
        """What the console has said since it was last asked, but for keys that were refused."""
        said = [entry["message"] for entry in self.driver.get_log("browser")]
        return [s for s in said if "401" not in s and "[DOM]" not in s]


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """profile: an empty folder for what it keeps."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(_BROWSER)
    for flag in (*_FLAGS, f"user-data-dir={profile}", "window-size=1280,1000"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # Nothing between the tests and the page.
    environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    service = webdriver.ChromeService(str(_DRIVER), env=environment)
    driver = webdriver.Chrome(options=options, service=service)
    try:
        yield Page(driver)
    finally:
        driver.quit()
