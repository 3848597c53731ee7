import itertools
import math

import pytest

from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.reports.style import SPARE_STYLES, STYLES, contrast_on_white, style_of


def test_every_strategy_has_a_look_of_its_own():
    assert set(STRATEGIES) == set(STYLES)
    assert len({style.colour for style in STYLES.values()}) == len(STYLES)
    assert not {style.colour for style in SPARE_STYLES} & {s.colour for s in STYLES.values()}


def test_dots_alone_tell_strategies_apart():
    seen = {name: as_seen(style.colour) for name, style in STYLES.items()}
    seen |= {f"own {index}": as_seen(style.colour) for index, style in enumerate(SPARE_STYLES)}
    pairs = {(a, b): math.dist(seen[a], seen[b]) for a, b in itertools.combinations(seen, 2)}
    closest = min(pairs, key=lambda pair: pairs[pair])
    assert pairs[closest] > 20, closest  # 2.3 is just noticeable, side by side
    assert pairs["single", "no-comm"] > 35


def as_seen(colour: str) -> tuple[float, float, float]:
    """Lightness, green to red and blue to yellow (CIELAB, D65), in which distances are alike."""
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    rows = ((0.4339, 0.3762, 0.1899), (0.2126, 0.7152, 0.0722), (0.0177, 0.1095, 0.8728))
    x, y, z = (
        math.cbrt(sum(weight * part for weight, part in zip(row, linear, strict=True)))
        for row in rows
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_line_and_marker_alone_tell_strategies_apart():
    looks = [(style.dashes, style.marker) for style in STYLES.values()]
    assert len(set(looks)) == len(looks)
    assert len({style.marker for style in STYLES.values()}) == len(STYLES)


def test_a_variant_differs_from_its_strategy_and_from_its_sisters():
    names = ["ddp", "ddp:hook=fp16", "ddp:hook=bf16", "ddp:bucket_cap_mb=1"]
    styles = [style_of(name, names) for name in names]
    assert [style.is_hollow for style in styles] == [False, True, True, True]
    assert len({(style.colour, style.dashes) for style in styles}) == 4
    assert len({style.marker for style in styles}) == 1
    assert styles[1] == style_of("ddp:hook=fp16", list(reversed(names)))


def test_a_class_of_ones_own_and_its_variant_are_one_family():
    own, variant = (style_of(name, ["ddp"]) for name in ("Averaging", "Averaging:every=4"))
    assert own.marker == variant.marker
    assert own.colour not in {style.colour for style in STYLES.values()}
    assert variant.is_hollow


def test_a_loop_keeps_its_look_and_differs_from_others():
    assert style_of("mine") == style_of("mine")
    names = [f"loop{number}" for number in range(len(SPARE_STYLES))]
    assert len({style_of(name, names).colour for name in names}) == len(SPARE_STYLES)


def test_more_loops_than_styles_still_have_one():
    names = [f"loop{number}" for number in range(30)]
    assert all(style_of(name, names).colour for name in names)


@pytest.mark.parametrize("shade", [0, 1, 2])
def test_text_in_a_strategys_colour_can_be_read(shade: int):
    inks = [style_of(name, (), shade).ink for name in (*STYLES, "mine", "other", "ddp:hook=fp16")]
    assert min(map(contrast_on_white, inks)) >= 4.5


def test_contrast_is_as_wcag_defines_it():
    assert contrast_on_white("#000000") == pytest.approx(21.0)
    assert contrast_on_white("#ffffff") == pytest.approx(1.0)
