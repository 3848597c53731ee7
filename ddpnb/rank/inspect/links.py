"""How long does a message take between each pair of ranks?  (ranks)"""

import itertools
import time
from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist

PROBE_SECONDS, PROBE_TRIPS = 0.05, 10
"""Messages between two ranks grow until one takes so long, and so many round trips: the first
ones over a long way are slowed down by TCP, which sends more after each answer."""
FIRST_PROBE_BYTES, MAX_PROBE_BYTES = 2**16, 2**24
FEWEST_TRIPS, MOST_TRIPS = 5, 40
TRIPS_SECONDS: Final = 0.2
"""No further round trip is made after this."""


def measure(ranks: Sequence[int], device: torch.device) -> list[tuple[int, int, float, float]]:
    """Measure the connections between ranks, one pair after the other; takes part: every rank.

    Returns:
        For each pair in which this rank is the sender: from, to, seconds one way, bytes per second.
    """
    if dist.get_backend() == "gloo":  # which takes a GPU's address for one of the host's memory
        device = torch.device("cpu")
    found = []
    for one, other in itertools.permutations(ranks, 2):
        dist.barrier()  # no other pair sends meanwhile
        if dist.get_rank() == one:
            found.append((one, other, *_measure(other, device)))
        elif dist.get_rank() == other:
            _answer(one, device)
    dist.barrier()
    return found


def _measure(peer: int, device: torch.device) -> tuple[float, float]:
    """Measure the connection to a rank that answers."""
    trips: list[float] = []
    while len(trips) < FEWEST_TRIPS or (len(trips) < MOST_TRIPS and sum(trips) < TRIPS_SECONDS):
        trips.append(_trip(peer, 1, device))
    trip, size = min(trips), FIRST_PROBE_BYTES
    long = max(PROBE_SECONDS, PROBE_TRIPS * trip)
    while (seconds := _trip(peer, size, device)) < long and size < MAX_PROBE_BYTES:
        size *= 4
    dist.send(torch.zeros(1, dtype=torch.long, device=device), peer)
    return trip / 2, size / max(seconds - trip, 1e-9)


def _trip(peer: int, size: int, device: torch.device) -> float:
    """Return the seconds from a message of so many bytes to an answer of one byte."""
    content, byte = (torch.zeros(num, dtype=torch.uint8, device=device) for num in (size, 1))
    dist.send(torch.tensor([size], device=device), peer)
    dist.recv(byte, peer)  # the other rank waits for the message
    byte.cpu()  # until it is there
    began = time.perf_counter()
    dist.send(content, peer)
    dist.recv(byte, peer)
    byte.cpu()
    return time.perf_counter() - began


def _answer(peer: int, device: torch.device) -> None:
    """Answer a rank that measures: before each message comes its size, in the end 0."""
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    size = torch.ones(1, dtype=torch.long, device=device)
    while dist.recv(size, peer) == peer and size.item():
        content = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
        dist.send(byte, peer)
        dist.recv(content, peer)
        dist.send(byte, peer)
