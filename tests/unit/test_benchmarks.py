"""Can every benchmark still be begun?"""

import importlib
from pathlib import Path

import pytest

import benchmarks

NAMES = sorted(path.stem for path in Path(benchmarks.__file__).parent.glob("[a-z]*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_what_a_benchmark_calls_is_there(name: str):
    importlib.import_module(f"benchmarks.{name}")
