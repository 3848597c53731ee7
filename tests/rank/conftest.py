from collections.abc import Callable, Iterator

import pytest

from tests.rank.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """A function that gives the group of so many ranks, kept for the whole session."""
    groups: dict[int, Ranks] = {}

    def group_of(world_size: int) -> Ranks:
        if world_size not in groups:
            groups[world_size] = Ranks(world_size)
        return groups[world_size]

    yield group_of
    for group in groups.values():
        group.close()


@pytest.fixture
def fresh_ranks() -> Iterator[Callable[[int], Ranks]]:
    """The same, for tests after which a group is of no more use."""
    groups: list[Ranks] = []

    def group_of(world_size: int) -> Ranks:
        groups.append(Ranks(world_size))
        return groups[-1]

    yield group_of
    for group in groups:
        group.close()
