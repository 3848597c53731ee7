"""Groups of tests that one process runs; interrupts reach the tests."""

import signal
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def pytest_configure() -> None:
    """Take interrupts also where they are ignored at the start, as under ``nohup make test &``.

    Python installs no handler then, and neither does any process that a test starts.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep a file's tests in one process, which starts the file's clusters once.

    Unit tests start nothing: any process runs any of them.
    """
    for item in items:
        room, *_ = place = item.path.relative_to(TESTS).parts
        if room != "unit" and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group("/".join(place)))
