"""Which tests run in one process with pytest-xdist; interrupts reach the tests."""

import importlib.util
import os
import signal
from collections.abc import Generator
from typing import Any

import pytest

# Needs the packages of an extra: make compat.
collect_ignore = [] if importlib.util.find_spec("lightning") else ["compat"]


def pytest_configure() -> None:
    """Take interrupts also where they are ignored at the start, as under ``nohup make test &``.

    Python installs no handler then, and neither does any process that a test starts.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """Have an interrupt that a test lets through end this test, where it would end all others."""
    try:
        yield
    except KeyboardInterrupt:
        if "PYTEST_XDIST_WORKER" not in os.environ:  # the user's own
            raise
        pytest.fail("KeyboardInterrupt")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep a file's tests in one process, which starts the file's clusters once.

    ``--dist loadgroup`` would do, but pytest 9.2 ignores it (pytest-xdist, issue 1386).
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Scheduling(config, log)


def group_of(nodeid: str) -> str:
    """Return which tests run in the same process as this one, one after the other."""
    path, name = nodeid.split("::", 1)
    starts_its_own = name.startswith("test_a_lesson_runs")
    if path.startswith("tests/unit/") or starts_its_own:  # any process runs any of them
        return nodeid
    for folder in ("tests/browser/", "tests/compat/"):  # one Chromium, one kernel
        if path.startswith(folder):
            return folder
    return path
