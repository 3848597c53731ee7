"""How do ranks train that each average with one neighbour at a time?  (Every rank.)

    worker i:  g    =   g_i(w_old)                     w_old: w_i as i has read it
               w_i, w_j  <-  (w_i + w_j) / 2           j: any other, chosen at random
               w_i  <-  w_i - lr * g

with g_i the gradient of the mean loss over a share of i's own.  All weights lie in memory that
the ranks share; i averages under the locks of both, taken in the order of ranks, whatever j is
at, and its step is made before it lets go of its own.  Nobody waits for anybody but for a lock;
a faster worker takes more shares.  Meanwhile others may have averaged with w_i, so that w_old is
not what the gradient is used on: staleness counts the updates by others between.

Reference: Lian, Zhang, Zhang and Liu, "Asynchronous Decentralized Parallel Stochastic Gradient
Descent", ICML 2018 (AD-PSGD), algorithm 1; the graph is complete.  Each worker has its own
optimizer, momentum included, which the paper leaves out.

Messages per step: none.  Bytes sent per step and rank: S, those of all parameters: the mean,
written into the neighbour's memory; 0 by a rank alone.  (As many are read there.)

A worker that dies costs the share it was at, and those being fetched ahead for it; it may join
anew, with the mean of the others.  All end with the mean of all weights, the dead's left out.

Options:

    together=on    the ranks meet in pairs, step by step, which waits for the slower of two:
                   D-PSGD, in ``pairs``.  So it is on GPUs, which share no such memory
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import final

from torch import nn

from ddpnb.rank.order import Share
from ddpnb.rank.strategies.base import Batch, Memory, Plan, Replica, State, StepReport, Strategy
from ddpnb.rank.strategies.neighbours import Neighbours
from ddpnb.rank.strategies.pairs import Pairs
from ddpnb.rank.transport.master import Log, no_log
from ddpnb.wire import RankState

_TOGETHER_NOTE = "On GPUs gossip meets in pairs, step by step: they share no memory (together=on)."


@final
class Gossip(Strategy):
    """Gossip in the way that the ranks allow.

    Args:
        together: whether ranks meet in pairs, step by step, also where they could share memory.
        timeout: seconds in which at least one worker must make progress, where none waits.
        log: is told of every read and update of this worker, where none waits.
    """

    def __init__(self, *, together: bool = False, timeout: float = 60.0, log: Log = no_log) -> None:
        self._way: Strategy = Pairs() if together else Neighbours(timeout=timeout, log=log)

    def plan(self, state: RankState) -> Plan:
        """Every rank trains."""
        if state.device.startswith("cpu") or isinstance(self._way, Pairs):
            return self._way.plan(state)
        return replace(Pairs().plan(state), notes=(_TOGETHER_NOTE,))

    def setup(self, replica: Replica) -> None:
        """Get ready in that way; takes part: every rank, or the one that joins.

        Raises:
            UserError: the ranks share no memory.
            RunOverError: there is nothing to join.
        """
        if replica.device.type != "cpu":
            self._way = Pairs()
        self._way.setup(replica)

    def shares(self) -> Iterator[Share]:
        """Whatever share is next; together: this rank's part of every global batch."""
        return self._way.shares()

    def step(self, batch: Batch) -> StepReport:
        """Train on one share; takes part: this rank, and together its neighbour."""
        return self._way.step(batch)

    def memory(self) -> Memory:
        """What that way holds."""
        return self._way.memory()

    def finish(self) -> nn.Module:
        """Take the mean; takes part: every living rank."""
        return self._way.finish()

    def save(self, replica: Replica) -> State:
        """Return what that way needs."""
        return self._way.save(replica)

    def load(self, replica: Replica, state: State) -> None:
        """Go on from there."""
        self._way.load(replica, state)

    def lost_shares(self) -> Sequence[Share]:
        """Return, on rank 0, what was handed out to workers that died; together: nothing."""
        return self._way.lost_shares()

    def close(self) -> None:
        """Close it."""
        self._way.close()
