"""The ipyparallel client: sends calls to the ranks and knows each rank's engine.

In a thread of ipyparallel, a callback receives every message and result from a rank, and puts it
into the call's queue.  Importing ipyparallel takes 0.3 s, so this module is imported while the
fork server starts.  Runs in the kernel.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import ipyparallel as ipp
from ipyparallel.error import RemoteError

from ddpnb.cluster.call import (
    START_TIMEOUT_SECONDS,
    WAIT_SECONDS,
    Call,
    Lost,
    Output,
    OutputEnded,
    Returned,
)
from ddpnb.cluster.interrupts import raise_if_interrupted
from ddpnb.cluster.processes import wait_for_file, wait_until
from ddpnb.cluster.wording import restart_command, say, them, to_sentence
from ddpnb.compat import ipyparallel_internals
from ddpnb.protocol.calls import calls
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RankState
from ddpnb.protocol.processes import refuse_fork

ASK_AGAIN_SECONDS = 2.0
"""If a new engine has not answered within this time, ddpnb asks the engine again.  The controller
drops messages to an engine that is not connected yet."""
FIRST_CONNECT_SECONDS = 2.0
CONNECT_SECONDS = 20.0
"""If the controller does not answer a new client within this time, ddpnb creates another client.

The first client waits for a shorter time, because the controller may have died.
"""
QUIET_SECONDS = 0.3
"""An engine is not asked before this time, because it may not be connected yet."""
LOOK_AGAIN_SECONDS = 3.0
"""If no new engine appears within this time, ddpnb lists the engines again with a new client.  The
controller does not report an engine that registers while the client connects."""


class EngineClient:
    """Sends calls to the ranks.  The constructor waits until the controller listens.

    Each rank requests an engine id that is equal to the rank.  If a dead engine still has this id,
    the new engine gets another id.  For this reason, ddpnb asks each new engine for its rank, and
    ``assign`` notes the engine.
    ``while_waiting`` is called repeatedly, and can raise an error to end the wait.
    """

    def __init__(self, profile: Path, while_waiting: Callable[[], None]) -> None:
        self._pid = os.getpid()
        self._path = profile / "security/ipcontroller-client.json"
        wait_for_file(self._path, while_waiting)
        self._client = connected_client(self._path, while_waiting)
        self._engine_of: dict[int, int] = {}
        self._known: set[int] = set()
        """The ids of the engines that have answered."""
        self._asked: dict[int, tuple[Call, float]] = {}
        """Maps each other engine to the question for its state and the time to ask again."""
        self._num_missing = 0
        """The number of engines that are expected and not there yet."""
        self._changed_at = 0.0
        """Time at which ``_num_missing`` last changed."""
        self._calls: list[Call] = []
        self._lock = threading.Lock()

    def submit(self, request: Any, ranks: Sequence[int]) -> Call:
        """Start a call on some ranks and return at once.

        If the controller has lost one of the ranks, or in a fork of the kernel, raises UserError.
        """
        refuse_fork(self._pid)
        call = Call(ranks)
        engine_of = {rank: self._engine_of.get(rank, -1) for rank in ranks}
        known = set(self._client.ids)
        if lost := [rank for rank, engine in engine_of.items() if engine not in known]:
            anew = f"Run {restart_command(lost)} to restart {them(lost)}"
            raise UserError(to_sentence(f"{say(lost, 'has')} left the cluster. {anew}"))
        with self._lock:  # a background cell's thread also submits calls
            self._calls = [other for other in self._calls if not other.done] + [call]
        for rank, engine in engine_of.items():
            self._send(call, rank, engine, request)
        return call

    def lose(self, rank: int, cause: str) -> None:
        """Tell all calls on a rank that the rank has ended, so that the calls stop waiting."""
        for call in self._calls:
            if rank in call.ranks:
                call.lose(rank, cause)

    def new_states(self, num: int) -> dict[int, RankState]:
        """Return the states of new engines, each once; ask engines that have not answered.

        ddpnb asks once ``num`` engines are there, or once no other engine has come for a while.
        This method does not wait.  Raises RuntimeError if an engine cannot give its state.
        """
        new, now = set(self._client.ids) - self._known, time.monotonic()
        if num - len(new) != self._num_missing:
            self._num_missing, self._changed_at = num - len(new), now
        if self._num_missing > 0 and now - self._changed_at < QUIET_SECONDS:
            return {}
        answers: dict[int, RankState] = {}
        for engine in new:
            call, ask_at = self._asked.get(engine, (Call([engine]), 0.0))
            for event in call.events(0.0):
                if isinstance(event, Lost):
                    self._known.add(engine)
                    raise RuntimeError(event.cause)
                if isinstance(event, Returned):
                    answers[engine] = event.value
            if now >= ask_at and call.running:
                self._send(call, engine, engine, calls.state())
                ask_at = now + ASK_AGAIN_SECONDS
            self._asked[engine] = call, ask_at
        self._known |= set(answers)
        return answers

    def assign(self, rank: int, engine: int) -> None:
        """Send the calls of a rank to this engine from now on."""
        self._engine_of[rank] = engine

    def wait_for(self, is_done: Callable[[], bool]) -> None:
        """Wait until ``is_done()``, which uses ``new_states``, is true.

        Raises TimeoutError if this takes too long.
        """

        def is_so() -> bool:
            if is_done():
                return True
            is_late = time.monotonic() - self._changed_at > LOOK_AGAIN_SECONDS
            if self._num_missing > 0 and is_late and all(call.done for call in self._calls):
                old, self._client = self._client, connected_client(self._path, is_done)
                self._asked.clear()
                old.close()
                self._changed_at = time.monotonic()
            return False

        wait_until(is_so, START_TIMEOUT_SECONDS, "not all ranks connected and answered")

    def close(self, ranks: Iterable[int], cause: str) -> None:
        """Disconnect from the controller.  All calls on ``ranks`` fail with the text ``cause``."""
        for rank in ranks:
            self.lose(rank, cause)
        self._client.close()

    def _send(self, call: Call, rank: int, engine: int, request: Any) -> None:
        def receive(kind: str, content: Any) -> None:
            match kind:
                case "result" if isinstance(content, RemoteError):
                    call.lose(rank, f"{content.ename}: {content.evalue}")
                case "result" if isinstance(content, BaseException):
                    call.lose(rank, str(content))
                case "result":
                    call.inbox.put(Returned(rank=rank, value=content))
                case "event":
                    call.inbox.put(content)
                case "idle":
                    call.inbox.put(OutputEnded(rank=rank))
                case _:
                    call.inbox.put(Output(rank=rank, kind=kind, content=content))

        ipyparallel_internals.start_call(self._client, engine, request, receive)


def connected_client(path: Path, while_waiting: Callable[[], object]) -> ipp.Client:
    """Connect a client to the controller; try again if the controller does not answer."""
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    timeout = FIRST_CONNECT_SECONDS
    while True:
        try:
            # Without a folder, IPython warns if the user's home is read-only.
            return ipp.Client(str(path), timeout=timeout, ipython_dir=str(path.parent))
        except OSError:  # such as TimeoutError, or the file was removed
            while_waiting()
            raise_if_interrupted()
            timeout = min(2 * timeout, CONNECT_SECONDS)
            time.sleep(WAIT_SECONDS)
            if time.monotonic() > deadline:
                raise
