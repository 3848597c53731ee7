"""Programs that tests need and pip does not install."""

import os
import shutil
from typing import NoReturn

import pytest


def find_program(names: list[str], reason: str) -> str:
    """Return the path of the first program that is installed; skip where there is none."""
    for name in names:
        if (path := shutil.which(name)) is not None:
            return path
    skip_or_fail(reason)


def skip_or_fail(reason: str) -> NoReturn:
    """Skip the test on a user's machine; fail it in CI, which installs every package."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)
