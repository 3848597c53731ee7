import pytest

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.notation import format_ranks, parse_ranks


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, (0, 1, 2, 3)),
        ("all", (0, 1, 2, 3)),
        ("  ", (0, 1, 2, 3)),
        ("2", (2,)),
        ("0,2-3", (0, 2, 3)),
        (" 3 , 0 - 1 ", (0, 1, 3)),
        ("1,1,0-1", (0, 1)),
    ],
)
def test_sets_of_ranks_are_read(text: str | None, expected: tuple[int, ...]):
    assert parse_ranks(text, 4) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abc", "'abc' does not name ranks: write numbers and ranges, such as 0,2-3."),
        ("-1", "does not name ranks"),
        ("1.5", "does not name ranks"),
        ("3-1", "'3-1' names no rank: write the smaller number first"),
        ("4", "There is no rank 4: the ranks are 0-3."),
        ("0,2-5", "There is no rank 4-5: the ranks are 0-3."),
    ],
)
def test_a_wrong_set_of_ranks_is_one_sentence(text: str, expected: str):
    with pytest.raises(UserError) as caught:
        parse_ranks(text, 4)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sets_of_ranks_are_written_the_short_way():
    for text in ("0", "0-1", "0,2-4", "1,3,5"):
        assert format_ranks(reversed(parse_ranks(text, 6))) == text
    assert format_ranks(()) == ""
