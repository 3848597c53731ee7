"""Builds the phrases about ranks that appear in messages.  Runs in the kernel."""

from collections.abc import Collection, Mapping

from ddpnb.protocol.notation import format_ranks, spoken_ranks

PLURALS = {"was": "were", "has": "have", "is": "are", "does": "do", "waits": "wait"}


def say(ranks: Collection[int], predicate: str) -> str:
    """Return a clause about ranks: ``say([0, 2], "waits here")`` is ``"ranks 0,2 wait here"``."""
    verb, space, rest = predicate.partition(" ")
    verb = verb if len(ranks) == 1 else PLURALS.get(verb, verb)
    return f"{spoken_ranks(ranks)} {verb}{space}{rest}"


def them(ranks: Collection[int]) -> str:
    """Return the pronoun for ranks: ``"it"`` for one rank, else ``"them"``."""
    return "it" if len(ranks) == 1 else "them"


def full_stop(text: str) -> str:
    """Add a full stop to a text, unless the text already ends with ``.``, ``?`` or ``!``."""
    return text if text.endswith((".", "?", "!")) else f"{text}."


def to_sentence(text: str) -> str:
    """Make a text a sentence: begin with a capital letter and end with a full stop."""
    return full_stop(text[:1].upper() + text[1:])


def restart_command(ranks: Collection[int]) -> str:
    """Return the ``%ddp_restart`` command that restarts these ranks."""
    return f"%ddp_restart --ranks {format_ranks(ranks)}"


def deaths(causes: Mapping[int, str]) -> str:
    """Return clauses that say how ranks died; ``causes`` maps each rank to its cause."""
    ranks_of: dict[str, list[int]] = {}
    for rank, cause in causes.items():
        ranks_of.setdefault(cause, []).append(rank)
    return "; ".join(say(sorted(ranks), cause) for cause, ranks in ranks_of.items())


def describe_silent(ranks: Collection[int]) -> str:
    """Return a clause that says which ranks do not answer, and the possible reasons."""
    it = "it" if len(ranks) == 1 else "they"
    why = f"{it} may be suspended, or may run code that holds the GIL"
    return f"{say(ranks, 'does not answer')}; {why}"
