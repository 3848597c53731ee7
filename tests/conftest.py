"""What a machine lacks is skipped with its reason; interrupts reach the tests."""

import signal

import pytest
import torch


def pytest_configure() -> None:
    """Take interrupts also where they are ignored at the start, as under ``nohup make test &``.

    Python installs no handler then, and neither does any process that a test starts.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    num_gpus = torch.cuda.device_count()
    needed = {"gpu": 1, "two_gpus": 2}
    for item in items:
        for marker, num in needed.items():
            if item.get_closest_marker(marker) and num_gpus < num:
                reason = f"needs {num} CUDA GPU{'s' if num > 1 else ''}, there are {num_gpus}"
                item.add_marker(pytest.mark.skip(reason=reason))
