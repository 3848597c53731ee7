"""A rank's process: an ipyparallel engine that serves calls, and its control thread (ranks)."""

import asyncio
import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from ipyparallel.engine.app import IPEngine
from traitlets import Instance

from ddpnb.compat.python_internals import leaves_loops, outside_of_loop
from ddpnb.protocol.connections import Address
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.processes import ForkServerEvent, RankCommand
from ddpnb.rank.group import Group
from ddpnb.rank.random_state import seed_everything
from ddpnb.rank.shell import RankStream, prepare
from ddpnb.rank.status import rank_status, users_stack
from ddpnb.rank.torchrun import AdoptedGroup, end_cells_with_exit, refuse_launchers

Handler = Callable[..., object]


def serve_commands(rank: int, pipe: Connection, handlers: Mapping[RankCommand, Handler]) -> None:
    """Carry out the kernel's commands, one at a time, and send back what the handlers return.

    The end of ``pipe``, which leads to the fork server, is the end of this process.
    """
    while True:
        try:
            message: dict[str, Any] = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            os.kill(os.getpid(), signal.SIGKILL)
        answer = {"event": ForkServerEvent.ANSWER, "rank": rank, "id": message["id"]}
        pipe.send_bytes(json.dumps(answer | answer_to(message, handlers)).encode())


def answer_to(
    message: Mapping[str, Any], handlers: Mapping[RankCommand, Handler]
) -> dict[str, object]:
    """Carry out a command; return its value, or how it failed."""
    try:
        value = handlers[RankCommand(message["command"])](*message.get("arguments", ()))
    except Exception as error:  # noqa: BLE001  the edge of the thread, which must live on
        traceback.print_exc()  # to the log
        return {"failure": "".join(traceback.format_exception_only(error)).strip()}
    return {"value": value}


class RankEngine(IPEngine):  # type: ignore[misc]  # ipyparallel has no type hints
    """The engine application of one rank; ``RankEngine.instance()`` returns it."""

    group = Instance(Group)
    adopted_group = Instance(AdoptedGroup)
    notebook_folder = ""
    """The notebook's working folder when it last called this rank."""
    publisher: Any = None
    """The publisher of the cell or run in progress."""
    sending: "Sending"
    answers = Instance(SimpleQueue, ())
    """The user's lines, for the rank that is debugged; None: there will be none.

    C code: the debugger, which asks too, cannot step into it.
    """
    data_cache = Instance(dict, ())
    """What the cell of the comparison in progress has loaded."""
    stop_wanted = Instance(threading.Event, ())
    """Set when the run in progress is to end early."""
    stop_expected = Instance(threading.Event, ())
    """Set when a rank of another host may end the run early; until the comparison ends."""

    async def complete_registration(self, *args: Any) -> None:
        """Prepare the shell as soon as the engine has one."""
        await super().complete_registration(*args)
        self.session.send = self.sending = Sending(self.session.send)
        self.log.setLevel(self.log_level)  # ipyparallel had set it to DEBUG: five records a cell
        self.kernel.pre_handler_hook = self.kernel.post_handler_hook = keep_signals
        shell = self.kernel.shell
        shell.loop_runner = CellLoop()
        prepare(shell)
        end_cells_with_exit(shell)
        for name in ("ps1", "ps2", "ps3"):  # IPython's; by them libraries know a prompt
            vars(sys).pop(name, None)
        shell.user_ns.update(
            rank=self.group.rank,
            local_rank=self.group.local_rank,
            world_size=self.group.world_size,
            device=self.group.device,
        )

    @property
    def shell(self) -> Any:
        """This rank's IPython; None while the engine starts."""
        return None if self.kernel is None else self.kernel.shell


class Sending:
    """Sends a rank's messages but those that nobody needs: with many ranks they add up.

    Nobody reads that a call has begun.  That a cell's output has ended needs no message where there
    was none: its result says so.  Nor does anyone read when a cell began, which takes an eighth of
    the kernel's time to parse.
    """

    def __init__(self, send: Callable[..., Any]) -> None:
        self._send = send
        self._streams = [each for each in (sys.stdout, sys.stderr) if isinstance(each, RankStream)]
        self._silent_cell = ""
        self.num_outputs = 0
        """How many messages were sent that are neither a call's result nor its begin or end."""

    def __call__(
        self, stream: Any, msg_or_type: Any, content: Any = None, *args: Any, **options: Any
    ) -> Any:
        """Send a message, as ``Session.send`` does."""
        if msg_or_type == "status":
            is_idle = content == {"execution_state": "idle"}
            if content == {"execution_state": "busy"} or (is_idle and self._is_silent(options)):
                return None
        elif msg_or_type != "apply_reply":
            self.num_outputs += 1
        elif self._is_silent(options):
            options["metadata"].pop("started", None)
        return self._send(stream, msg_or_type, content, *args, **options)

    def settle(self, seconds: float) -> None:
        """Wait until what was written to this process's descriptors is in its streams."""
        for stream in self._streams:
            stream.settle(seconds)

    def end_cell(self, cell: str, num_outputs_before: int) -> bool:
        """Return whether a cell, by its request's id, has no output; its end is then not sent."""
        is_sent = not any(stream.has_written for stream in self._streams)
        is_silent = is_sent and self.num_outputs == num_outputs_before
        self._silent_cell = cell if is_silent else ""
        return is_silent

    def _is_silent(self, options: Mapping[str, Any]) -> bool:
        return bool(self._silent_cell) and id_of(options.get("parent")) == self._silent_cell


def id_of(request: Any) -> str:
    """Return the id of a request to the rank; empty if there is none."""
    return str(request["header"].get("msg_id", "")) if request else ""


def keep_signals() -> None:
    """Leave SIGINT alone around a message, unlike ipykernel; see ``cells.interruptible``."""


class CellLoop:
    """Runs a cell's top-level ``await`` while the engine's own loop is running.

    The engine's loop cannot be entered a second time.  Ipykernel's solution needs a thread that
    ipyparallel's engines do not have, and hangs.  So the cells of a rank share a loop of their own,
    as they do in a terminal's IPython.
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()

    def __call__(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run ``coroutine`` to its end on the cells' loop."""
        if not leaves_loops.works:
            coroutine.close()
            raise UserError(f"{leaves_loops.sentence}.")
        with outside_of_loop():
            task = self.loop.create_task(coroutine)
            try:
                return self.loop.run_until_complete(task)
            except KeyboardInterrupt:
                task.cancel()  # else it would continue in the next cell that awaits
                with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
                    self.loop.run_until_complete(task)
                raise


def run(settings: Mapping[str, Any], *, pipe: Connection, folder: Path) -> None:
    """Join the process group, then serve as an ipyparallel engine until the process is stopped.

    Args:
        settings: ``device``, ``shares_device``, ``backend``, ``num_threads``,
            ``generation`` (None: join no group yet), ``cells_folder`` (where cells run),
            ``engine_arguments`` (ipyparallel's command line), ``host`` (its name, as the user
            wrote it) and ``peers`` (the addresses of the other hosts).
        pipe: the pipe to the fork server.
        folder: the cluster's private run folder.
    """
    os.chdir(folder)  # ipyparallel would read configuration from a folder of the user's
    log = os.fdopen(os.dup(2), "w")
    faulthandler.enable(log, all_threads=False)  # a crash writes its stack to the log
    torch.set_num_threads(settings["num_threads"])
    seed_everything(None)
    device = torch.device(settings["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = Group(
        rank=int(os.environ["RANK"]),  # and below: as torchrun sets them
        local_rank=int(os.environ["LOCAL_RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        master=Address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])),
        backend=settings["backend"],
        device=device,
        shares_device=settings["shares_device"],
        folder=folder,
        host=settings["host"],
        peers=frozenset(settings["peers"]),
    )
    adopted_group = AdoptedGroup(group)
    adopted_group.install()
    refuse_launchers(group)
    engine = RankEngine.instance(
        group=group, adopted_group=adopted_group, out_stream_factory=RankStream
    )
    handlers = {
        RankCommand.ABORT: group.abort,
        RankCommand.ANSWER: engine.answers.put,
        RankCommand.STATUS: lambda: asdict(rank_status(group, engine.shell)),
        RankCommand.STACK: lambda: users_stack(engine.shell),
        RankCommand.EXPECT_STOP: engine.stop_expected.set,
        RankCommand.STOP: engine.stop_wanted.set,
    }
    threading.Thread(
        target=serve_commands,
        args=(group.rank, pipe, handlers),
        name="ddpnb-control",
        daemon=True,
    ).start()
    if settings["generation"] is not None:  # else the others train: it is formed when they are done
        group.join(settings["generation"])
    engine.initialize(settings["engine_arguments"])
    engine.notebook_folder = settings["cells_folder"]
    os.chdir(engine.notebook_folder)
    engine.start()
