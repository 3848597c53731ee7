import pytest

from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.reports.kit import MAX_NOTE_LINES, RANK_COLOURS, ink_on, note_lines
from ddpnb.reports.style import SPARE_STYLES, STYLES, contrast_on_white, style_of


def test_every_strategy_has_a_look_of_its_own():
    assert set(STRATEGIES) == set(STYLES)
    colours = [style.colour for style in (*STYLES.values(), *SPARE_STYLES)]
    assert len(set(colours)) == len(colours)
    assert len({style.marker for style in STYLES.values()}) == len(STYLES)
    assert len({(style.dashes, style.marker) for style in STYLES.values()}) == len(STYLES)


def test_a_variant_differs_from_its_strategy_and_from_its_sisters():
    names = ["ddp", "ddp:hook=fp16", "ddp:hook=bf16", "ddp:bucket_cap_mb=1"]
    styles = [style_of(name, names) for name in names]
    assert [style.is_hollow for style in styles] == [False, True, True, True]
    assert len({(style.colour, style.dashes) for style in styles}) == 4
    assert len({style.marker for style in styles}) == 1
    assert styles[1] == style_of("ddp:hook=fp16", list(reversed(names)))
    own, variant = (style_of(name, ["ddp"]) for name in ("Averaging", "Averaging:every=4"))
    assert own.marker == variant.marker


def test_a_loop_keeps_its_look_and_differs_from_others():
    assert style_of("mine") == style_of("mine")
    names = [f"loop{number}" for number in range(30)]
    colours = [style_of(name, names[: len(SPARE_STYLES)]).colour for name in names]
    assert len(set(colours[: len(SPARE_STYLES)])) == len(SPARE_STYLES)


@pytest.mark.parametrize("shade", [0, 1, 2])
def test_text_in_a_strategys_colour_can_be_read(shade: int):
    inks = [style_of(name, (), shade).ink for name in (*STYLES, "mine", "other", "ddp:hook=fp16")]
    assert min(map(contrast_on_white, inks)) >= 4.5


def test_text_on_a_ranks_colour_can_be_read():
    assert contrast_on_white("#000000") == pytest.approx(21.0)
    for colour in RANK_COLOURS:
        grounds = contrast_on_white(colour), contrast_on_white(ink_on(colour))
        assert max(grounds) / min(grounds) >= 3.5


def test_whole_notes_are_shown_while_they_fit():
    assert note_lines(["one", "two", "word " * 100, "four"]) == ["one", "two"]
    assert len(note_lines(["note"] * 9)) == MAX_NOTE_LINES
    assert len(note_lines(["word " * 40])) == 2
