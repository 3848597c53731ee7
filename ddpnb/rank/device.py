"""Waits for a device, and times calls on it.  Runs on the ranks."""

import time
from collections.abc import Callable

import torch


def synchronize(device: torch.device) -> None:
    """If the device is a GPU, wait until it has finished its work, so that a clock can be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Return the duration of a call in seconds, including the work that it starts on the device."""
    synchronize(device)
    began = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - began
