import weakref

from ddpnb.rank.cells import release_frames, text_of


class Loader:
    """Anything that a frame holds and that must end."""


def test_frames_are_released_whatever_an_error_was_raised_from():
    held = []

    def interrupted() -> None:
        loader = Loader()
        held.append(weakref.ref(loader))
        raise KeyboardInterrupt

    try:
        try:
            interrupted()
        except KeyboardInterrupt:
            raise RuntimeError("the cell's own") from ValueError("another")
    except RuntimeError as error:
        release_frames(error)
        (loader,) = held
        assert loader() is None


class MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def test_an_error_that_cannot_say_anything_is_still_told():
    assert text_of(MuteError()) == "<exception str() failed>"
