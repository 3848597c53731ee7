import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from tests.rank.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """A function that gives the group of so many ranks, kept for the whole session."""
    with ExitStack() as opened:
        yield functools.cache(lambda size: opened.enter_context(closing(Ranks(size))))


@pytest.fixture
def fresh_ranks() -> Iterator[Callable[[int], Ranks]]:
    """The same, for tests after which a group is of no more use."""
    with ExitStack() as opened:
        yield lambda size: opened.enter_context(closing(Ranks(size)))
