"""Do the texts stay plain English, and their sentences short?"""

import pytest

from tests import prose


@pytest.mark.parametrize("kind", prose.KINDS)
def test_small_words_occur_as_often_as_in_plain_technical_english(kind: str):
    assert prose.outside(kind) == []


@pytest.mark.parametrize("kind", ["pages", "lessons"])
def test_no_sentence_is_too_long(kind: str):
    long = [each for each in prose.sentences(kind) if len(each.split()) > prose.LONGEST]
    assert long == []


def test_the_profile_finds_a_translation():
    text = "Where one of them is refused, what it lacks stands in place of it. "
    found = prose.KINDS | {"odd": lambda: iter([text])}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prose, "KINDS", found)
        assert {each.split("'")[1] for each in prose.outside("odd")} == {
            "if",
            "because",
            "instead",
            "where",
            "what",
            "in place of",
            "refuses|refused",
            "stands|stand for|lies|lie",
        }
