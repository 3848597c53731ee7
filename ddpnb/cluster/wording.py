"""Grammar and remedies of what users read about ranks (kernel)."""

from collections.abc import Collection

from ddpnb.protocol.notation import format_ranks, spoken_ranks

PLURALS = {"was": "were", "has": "have", "is": "are", "does": "do", "waits": "wait"}


def say(ranks: Collection[int], predicate: str) -> str:
    """Return what ranks do: ``say([0, 2], "waits here")`` is ``"ranks 0,2 wait here"``."""
    verb, space, rest = predicate.partition(" ")
    verb = verb if len(ranks) == 1 else PLURALS.get(verb, verb)
    return f"{spoken_ranks(ranks)} {verb}{space}{rest}"


def them(ranks: Collection[int]) -> str:
    """Return the pronoun of ranks that a sentence has named."""
    return "it" if len(ranks) == 1 else "them"


def full_stop(text: str) -> str:
    """Return a text with the full stop that it may lack."""
    return text if text.endswith((".", "?", "!")) else f"{text}."


def sentence(text: str) -> str:
    """Return a text with a capital letter at its beginning and a full stop at its end."""
    return full_stop(text[:1].upper() + text[1:])


def restart(ranks: Collection[int]) -> str:
    """Return the magic that starts ranks anew."""
    return f"%ddp_restart --ranks {format_ranks(ranks)}"


def remedy(dead: Collection[int]) -> str:
    """Say what brings dead ranks back, and that it costs the others nothing."""
    return f"{restart(dead)} brings {them(dead)} back, the other ranks keep their variables"
