"""Programs that tests run. pip does not install all of them."""

import contextlib
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import IPython
import pytest


def find_program(names: list[str], reason: str) -> str:
    """Return the path of the first installed program. Skip the test if none is installed."""
    for name in names:
        if (path := shutil.which(name)) is not None:
            return path
    skip_or_fail(reason)


def skip_or_fail(reason: str) -> NoReturn:
    """Skip the test on a user's machine. Fail it in CI, because CI installs every package."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def development_package(name: str) -> Any:
    """Import a package that tests need. Skip the test in an environment of older versions.

    These environments, such as Colab's, have only the packages that ddpnb needs.
    """
    if IPython.version_info >= (9,):
        return importlib.import_module(name)
    return pytest.importorskip(name, reason=f"{name} is not installed with older versions")


@contextlib.contextmanager
def daemon(words: list[str], **options: Any) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a program. Terminate it at the end, and kill it if it is still alive after 20 s."""
    process = subprocess.Popen(words, **options)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def python(source: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Run a Python process. Yield the process and the first line that it prints."""
    words, pipe = [sys.executable, "-c", source], subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as process:
        yield process, process.stdout.readline()


def printed(source: str) -> str:
    """Run a Python process that must succeed, and return its output."""
    words = [sys.executable, "-c", source]
    ended = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    return ended.stdout
