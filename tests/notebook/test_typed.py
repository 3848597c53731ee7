"""The twins in Python refuse what cannot be in a sentence, before anything is begun."""

import inspect
from collections.abc import Callable

import numpy as np
import pytest

from ddpnb.errors import UserError
from ddpnb.notebook import api

WRONG = {
    "epochs is a number, not 'two'.": lambda: api.compare("ddp", task="digits", epochs="two"),
    "repeats is a whole number, not 1.5.": lambda: api.compare("ddp", repeats=1.5),
    "each of strategies is a text, not a type.": lambda: api.compare(int, task="digits"),
    "slow is a text or a list of texts, not a list.": lambda: api.compare("ddp", slow=[1]),
    "clip is a number or None, not '1'.": lambda: api.compare("ddp", clip="1"),
    "target is a number or None, not an object.": lambda: api.compare("ddp", target=object()),
    "n is a whole number or None, not True.": lambda: api.start(True),
    "attach is True or False or a text, not 3.": lambda: api.start(attach=3),
    "source is a text, not None.": lambda: api.run_cell(None),
    "ranks is a text or None, not 3.": lambda: api.push(3, a=1),
    "path is a path or a text, not 3.": lambda: api.export("race", 3),
}


@pytest.mark.parametrize("sentence", WRONG)
def test_what_is_of_another_type_is_refused_in_a_sentence(sentence: str):
    with pytest.raises(UserError) as raised:
        WRONG[sentence]()
    assert str(raised.value) == sentence


def test_numbers_of_numpy_and_whole_numbers_are_numbers():
    with pytest.raises(UserError, match="bf17"):  # which is looked at after the types
        api.compare(
            "ddp", task="digits", batch_size=np.int64(8), lr=np.float32(1), epochs=2, amp="bf17"
        )


def test_all_twins_are_checked():
    twins: list[Callable[..., object]] = [
        function
        for name, function in inspect.getmembers(api, inspect.isfunction)
        if function.__module__ == api.__name__ and not name.startswith("_")
    ]
    assert len(twins) > 10
    for twin in twins:
        assert hasattr(twin, "__wrapped__"), twin
