import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from tests.rank.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """A function that returns the group of this many ranks. The session keeps each group."""
    with ExitStack() as opened:
        yield functools.cache(lambda size: opened.enter_context(closing(Ranks(size))))


@pytest.fixture
def fresh_ranks() -> Iterator[Callable[[int], Ranks]]:
    """A function that starts a new group, for tests that leave the group unusable."""
    with ExitStack() as opened:
        yield lambda size: opened.enter_context(closing(Ranks(size)))
