"""Runs a rank's process: the engine and the control thread.  Runs on the ranks."""

import faulthandler
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any

import torch
from ipyparallel.engine.app import IPEngine
from traitlets import Instance

from ddpnb.compat.ipykernel_internals import DescriptorStream, streams
from ddpnb.protocol.cell_messages import StaleVariable
from ddpnb.protocol.processes import ForkServerEvent, RankCommand, process_log
from ddpnb.rank import process_end
from ddpnb.rank.group import Group
from ddpnb.rank.random_state import note_start, seed_everything
from ddpnb.rank.shell import prepare_shell
from ddpnb.rank.status import rank_status, users_stack
from ddpnb.rank.torchrun import adopt, refuse_launchers


def serve_commands(pipe: Connection, handlers: Mapping[RankCommand, Any]) -> None:
    """Execute the kernel's commands one at a time; send back a value or an error for each command.

    ``pipe`` is connected to the fork server.  If the pipe closes, this process ends.
    """
    while True:
        try:
            message: dict[str, Any] = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            os.kill(os.getpid(), signal.SIGKILL)
        answer = {"event": ForkServerEvent.ANSWER, "id": message["id"]}
        try:
            handler = handlers[RankCommand(message["command"])]
            answer["value"] = handler(*message.get("arguments", ()))
        except Exception as error:  # noqa: BLE001  the thread must survive any error
            traceback.print_exc()  # to the rank's log
            answer["failure"] = "".join(traceback.format_exception_only(error)).strip()
        pipe.send_bytes(json.dumps(answer).encode())


class RankEngine(IPEngine):  # type: ignore[misc]  # ipyparallel has no type hints
    """The engine application of one rank; ``RankEngine.instance()`` returns it."""

    group = Instance(Group)
    began: process_end.Inventory | None = None
    """The mark of ``process_end`` before the first cell; None while the engine starts."""
    notebook_folder = ""
    """The notebook's working folder when the notebook last called this rank."""
    stale: Mapping[StaleVariable, int] = MappingProxyType({})
    """Variables that belonged to the previous process group, with the ids of their objects."""
    num_outputs = 0
    """Number of messages that the latest cell has sent, except status messages and results."""
    silent_request = ""
    """Id of the request for the latest cell, if the cell had no output."""
    publisher: Any = None
    """The publisher of this rank's latest cell; None before the first cell."""
    answers = Instance(SimpleQueue, ())
    """Lines that the user types to debug this rank.  A None entry means that no more lines follow.

    The queue is a ``SimpleQueue``, because the debugger cannot step into this class's C code.
    """
    stop_wanted = Instance(threading.Event, ())
    """An event that is set when the run in progress should end early."""

    async def complete_registration(self, *args: Any) -> None:
        """Prepare the IPython shell as soon as the engine has created the shell."""
        if (registering := super().complete_registration(*args)) is not None:
            await registering  # ipyparallel 8 registers without a coroutine
        self.session.send = partial(self._send, self.session.send)
        self.log.setLevel(self.log_level)  # ipyparallel's DEBUG logs five records per cell
        # Unlike ipykernel, do not change SIGINT's handler around a message: see interruptible.
        self.kernel.pre_handler_hook = self.kernel.post_handler_hook = lambda: None
        shell = self.kernel.shell
        prepare_shell(shell)
        for name in ("ps1", "ps2", "ps3"):  # IPython's; libraries would expect a prompt
            vars(sys).pop(name, None)
        shell.user_ns.update(
            rank=self.group.rank,
            local_rank=self.group.local_rank,
            world_size=self.group.world_size,
            device=self.group.device,
        )
        note_start()
        self.began = process_end.take_inventory()

    def init_signal(self) -> None:
        """Let SIGTERM kill the rank, unless a cell sets a handler.  SIGHUP ends the rank."""
        super().init_signal()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, self._end)

    def _end(self, number: int, frame: Any) -> None:
        """End the engine's loop, then call the cell's handler of SIGTERM, if there is one."""
        self._signal_stop(number, frame)
        if callable(handler := signal.getsignal(signal.SIGTERM)):
            handler(signal.SIGTERM, frame)

    @property
    def shell(self) -> Any:
        """This rank's IPython shell; None while the engine starts."""
        return None if self.kernel is None else self.kernel.shell

    def _send(
        self, send: Any, stream: Any, kind: Any, content: Any = None, *args: Any, **options: Any
    ) -> Any:
        """Send a message, except the status messages that the kernel does not need.

        The kernel does not need messages about the beginning of a call or about the end of a cell
        without output.  With many ranks, these messages take time.
        """
        if kind == "status":
            request = (options.get("parent") or {}).get("msg_id")
            if request == self.silent_request or content == {"execution_state": "busy"}:
                return None
        elif kind != "apply_reply":
            self.num_outputs += 1
        return send(stream, kind, content, *args, **options)

    def end_cell(self) -> bool:
        """Return True if the latest cell had no output; then drop its last status message."""
        is_silent = not self.num_outputs and not any(each.has_written for each in streams())
        self.silent_request = self.kernel.get_parent("shell")["msg_id"] if is_silent else ""
        return is_silent


def run(settings: Mapping[str, Any], *, pipe: Connection, folder: Path) -> None:
    """Join the process group, then serve as an ipyparallel engine until the process ends.

    Args:
        settings: the rank's settings from ``cluster.placement.rank_settings``.  An additional
            entry, ``engine_arguments``, is the command line for ipyparallel.
        pipe: the pipe to the fork server.
        folder: the cluster's private run folder.
    """
    os.chdir(folder)  # ipyparallel would read configuration files from a user's folder
    log = os.fdopen(os.dup(2), "w")
    faulthandler.enable(log, all_threads=False)  # a crash writes its stack to the log
    torch.set_num_threads(settings["num_threads"])
    seed_everything(None)
    device = torch.device(settings["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = Group(
        rank=int(os.environ["RANK"]),  # torchrun sets the same variables
        local_rank=int(os.environ["LOCAL_RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        master=(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])),
        backend=settings["backend"],
        device=device,
        folder=folder,
        host=settings["host"],
        peers=frozenset(settings["peers"]),
    )
    adopt(group)
    refuse_launchers(group.world_size)
    DescriptorStream.path = str(process_log(folder, f"{group.rank}.%s"))
    DescriptorStream.num_ranks = group.world_size
    engine = RankEngine.instance(group=group, out_stream_factory=DescriptorStream)
    handlers = {
        RankCommand.ABORT: group.abort,
        RankCommand.ANSWER: engine.answers.put,
        RankCommand.STATUS: lambda: asdict(rank_status(group)),
        RankCommand.STACK: users_stack,
        RankCommand.STOP: engine.stop_wanted.set,
    }
    threading.Thread(
        target=serve_commands, args=(pipe, handlers), name="ddpnb-control", daemon=True
    ).start()
    if settings["generation"] is not None:  # otherwise after the other ranks' run
        group.join(settings["generation"])
    engine.initialize(settings["engine_arguments"])
    engine.notebook_folder = settings["cells_folder"]
    os.chdir(engine.notebook_folder)
    try:
        engine.start()
    finally:
        if engine.began is not None:  # the fork server waits only some seconds
            process_end.end(engine.began, process_end.CHILDREN_SECONDS)
            process_end.finalize(engine.began, process_end.CHILDREN_SECONDS)
