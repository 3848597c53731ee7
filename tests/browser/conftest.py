"""One Chromium and one JupyterLab for all test files here. Each file uses its own subfolder."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.browser.lab import CHROMIUM_FLAGS, find_chromium, lab_server


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    path = find_chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=CHROMIUM_FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def lab_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(scope="package")
def lab_address(chromium: Browser, lab_folder: Path) -> Iterator[str]:
    """JupyterLab's address, to be formatted with a ``path`` in the served folder."""
    with lab_server(lab_folder) as address:
        yield address
