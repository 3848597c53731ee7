"""Groups tests into processes for pytest-xdist, and lets interrupts reach the tests."""

import importlib.util
import os
import signal
import sys
from collections.abc import Generator
from typing import Any

import pytest

# Otherwise nbformat imports this package of jsonschema, which parses a grammar for two seconds.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

# tests/compat needs the packages that `make compat` installs.
collect_ignore = [] if importlib.util.find_spec("lightning") else ["compat"]


def pytest_configure() -> None:
    """Handle SIGINT even if pytest was started to ignore it, as under ``nohup make test &``.

    Otherwise Python installs no handler, neither here nor in the processes that tests start.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """Fail only the current test if it raises KeyboardInterrupt, instead of ending the session."""
    try:
        yield
    except KeyboardInterrupt:
        if "PYTEST_XDIST_WORKER" not in os.environ:  # the user's own interrupt
            raise
        pytest.fail("KeyboardInterrupt")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run all tests of a file in one process, so that the file's clusters start only once.

    ``--dist loadgroup`` would do the same, but pytest 9.2 ignores it (pytest-xdist, issue 1386).
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Scheduling(config, log)


def group_of(nodeid: str) -> str:
    """Return the name of a test's group. A group's tests run in one process, one by one."""
    path, name = nodeid.split("::", 1)
    starts_its_own = name.startswith("test_a_lesson_runs")
    if path.startswith("tests/unit/") or starts_its_own:  # a group of one test
        return nodeid
    for folder in ("tests/browser/", "tests/compat/"):  # share a Chromium or a kernel
        if path.startswith(folder):
            return folder
    return path
