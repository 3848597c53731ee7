"""Tests that need a GPU are skipped where there is none."""

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    num_gpus = torch.cuda.device_count()
    needed = {"gpu": 1, "two_gpus": 2}
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        for marker, num in needed.items():
            if item.get_closest_marker(marker) and num_gpus < num:
                reason = f"needs {num} CUDA GPU{'s' if num > 1 else ''}, there are {num_gpus}"
                item.add_marker(pytest.mark.skip(reason=reason))
