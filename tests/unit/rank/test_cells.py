import weakref

from ddpnb.rank.cells import release_frames


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
