"""The texts stay plain English, and their sentences stay short."""

import importlib.util

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
        assert len(prose.outside("odd")) == 8


def test_the_site_lists_the_sixty_messages_that_users_see_most():
    spec = importlib.util.spec_from_file_location("reference", prose.ROOT / "docs/reference.py")
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    listed = [line for line in reference.messages() if line.startswith("- ")]
    assert len(set(listed)) == len(listed) >= 60
