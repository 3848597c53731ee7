import pytest

from ddpnb.catalogue import STRATEGIES
from ddpnb.notebook.show.theme import SPARE_STYLES, STYLES, contrast_on_white, style_of


def test_every_strategy_has_a_look_of_its_own():
    assert set(STRATEGIES) <= set(STYLES)
    assert len({style.colour for style in (*STYLES.values(), *SPARE_STYLES)}) == 10
    assert len({style.marker for style in STYLES.values()}) == len(STYLES)


def test_a_loop_keeps_its_look_and_is_told_from_others():
    assert style_of("mine") == style_of("mine")
    names = [f"loop{number}" for number in range(len(SPARE_STYLES))]
    assert len({style_of(name, names).colour for name in names}) == len(SPARE_STYLES)


def test_more_loops_than_styles_still_have_one():
    names = [f"loop{number}" for number in range(30)]
    assert all(style_of(name, names).colour for name in names)


@pytest.mark.parametrize("shade", [0, 1, 2])
def test_text_in_a_strategys_colour_can_be_read(shade: int):
    inks = [style_of(name, (), shade).ink for name in (*STYLES, "mine", "other")]
    assert min(map(contrast_on_white, inks)) >= 4.5


def test_contrast_is_as_wcag_defines_it():
    assert contrast_on_white("#000000") == pytest.approx(21.0)
    assert contrast_on_white("#ffffff") == pytest.approx(1.0)
