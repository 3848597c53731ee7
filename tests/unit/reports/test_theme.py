import pytest

from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.reports.kit import RANK_COLOURS, ink_on
from ddpnb.reports.style import SPARE_STYLES, contrast_on_white, ink_of, style_of

LOOKS = [entry.look for entry in STRATEGIES.values()]


def test_every_strategy_has_a_look_of_its_own():
    colours = [look.colour for look in (*LOOKS, *SPARE_STYLES)]
    assert len(set(colours)) == len(colours)
    assert len({look.marker for look in LOOKS}) == len(LOOKS)
    loops = [style_of(f"loop{n}", [f"loop{n}" for n in range(6)]) for n in range(6)]
    assert set(loops) == set(SPARE_STYLES)
    assert style_of("mine") == style_of("mine")


def test_a_variant_differs_from_its_strategy_and_from_its_sisters():
    names = ["ddp", "ddp:hook=fp16", "ddp:hook=bf16", "ddp:bucket_cap_mb=1"]
    styles = [style_of(name, names) for name in names]
    assert [style.is_hollow for style in styles] == [False, True, True, True]
    assert len({style.dashes for style in styles}) == 4
    assert len({style.marker for style in styles}) == 1
    assert styles[1] == style_of("ddp:hook=fp16", list(reversed(names)))
    own, variant = (style_of(name, ["ddp"]) for name in ("Averaging", "Averaging:every=4"))
    assert own.marker == variant.marker


@pytest.mark.parametrize("shade", [0, 2])
def test_text_in_a_strategys_colour_can_be_read(shade: int):
    inks = [ink_of(style_of(name, (), shade)) for name in (*STRATEGIES, "mine", "ddp:hook=fp16")]
    assert min(map(contrast_on_white, inks)) >= 4.5


def test_text_on_a_ranks_colour_can_be_read():
    assert contrast_on_white("#000000") == pytest.approx(21.0)
    for colour in RANK_COLOURS:
        grounds = contrast_on_white(colour), contrast_on_white(ink_on(colour))
        assert max(grounds) / min(grounds) >= 3.5
