"""Uses private parts of ipyparallel.  Runs in the kernel and the controller."""

import inspect
import threading
from collections.abc import Callable
from typing import Any

import ipyparallel as ipp
from ipyparallel.client.futures import MessageFuture
from ipyparallel.controller import heartmonitor

from ddpnb.compat.probe import Probe

Receive = Callable[[str, Any], None]
"""A function that another thread calls with the kind and the content of each message of a call.

For the kind ``"event"``, the content is an object from ``publish_data``.  For ``"result"``, the
content is the call's value or exception.  A message of the kind ``"idle"`` says that all output has
arrived.  Every other kind is a Jupyter message from the engine's output channel.
"""

# -- calls ---------------------------------------------------------------------------------


@Probe("ipyparallel", "output and curves appear only when the cell or the run has ended")
def follows_calls() -> bool:
    """Return True if the kernel can receive an engine's messages during a call."""
    return (
        "message_future_hook" in inspect.signature(ipp.Client.send_apply_request).parameters
        and "_mux_stream" in ipp.Client._setup_streams.__code__.co_names
        and "_engines" in ipp.Client.class_trait_names()
        and MessageFuture("").iopub_callbacks == []
    )


def start_call(
    client: ipp.Client, engine: int, function: Callable[[], object], receive: Receive
) -> None:
    """Start ``function()`` on an engine, and return at once.

    The engine must be able to import the function.  ``receive`` is called for each message.
    """
    if not follows_calls.works:
        result = client[engine].apply_async(function)
        threading.Thread(target=_hand_over, args=(result, receive), daemon=True).start()
        return
    future = client.send_apply_request(
        client._mux_stream,  # as in DirectView, which has no hook for callbacks
        function,
        ident=client._engines[engine].encode(),
        message_future_hook=lambda future: _follow(future, receive),
    )
    future.add_done_callback(lambda future: _finish(future, receive))


def _finish(future: Any, receive: Receive) -> None:
    """Forward a call's result.  If the call had no output, mark its output as complete."""
    outcome = _outcome(future)
    receive("result", outcome)
    if getattr(outcome, "is_silent", False) and not future.output.done():
        future.output.set_result(None)  # like ipyparallel on "idle"


def _follow(future: Any, receive: Receive) -> None:
    """Forward each output message of a request as soon as the message arrives."""

    def on_message(message: dict[str, Any]) -> None:
        kind, content = message["header"]["msg_type"], message["content"]
        metadata = future.output.metadata
        match kind:
            case "status":
                pass  # on "idle", ipyparallel resolves the output future below
            case "data_message":
                for published in list(metadata["data"].values()):
                    receive("event", published)
                metadata["data"].clear()
            case _:
                metadata.update(stdout="", stderr="")  # already forwarded, so not stored again
                receive(kind, content)

    future.iopub_callbacks.append(on_message)
    future.output.add_done_callback(lambda _: receive("idle", None))


def _hand_over(result: ipp.AsyncResult, receive: Receive) -> None:
    """Wait until a call ends, then forward all its messages."""
    result.wait()
    if not getattr(_outcome(result), "is_silent", False):  # a silent call sends no "idle"
        result.wait_for_output()
    metadata = result.metadata
    for name in ("stdout", "stderr"):
        if text := metadata[name]:
            receive("stream", {"name": name, "text": text})
    for content in metadata["outputs"]:
        receive("display_data", content)
    if content := metadata["execute_result"]:
        receive("execute_result", content)
    for published in metadata["data"].values():
        receive("event", published)
    receive("idle", None)
    receive("result", _outcome(result))


def _outcome(future: Any) -> Any:
    return future.exception() or future.result()


# -- heartbeats ----------------------------------------------------------------------------


@Probe("ipyparallel", "the ranks need a few more seconds to start")
def replaces_heartbeats() -> bool:
    """Return True if ddpnb can change the rate of the controller's heartbeats."""
    names = {*heartmonitor.HeartMonitor.start.__code__.co_names}
    return {"PeriodicCallback", "caller"} <= names and (
        "loop" in heartmonitor.HeartMonitor.class_trait_names()
    )


def beat_quickly_at_first(milliseconds: int, seconds: float) -> None:
    """Make this process's controller send quick heartbeats at first.

    Call this before the controller starts.  An engine can register only on a heartbeat.  During the
    first ``seconds``, the controller sends a heartbeat every ``milliseconds``.  After that, the
    controller uses the rate from its command line.
    """
    if not replaces_heartbeats.works:
        return

    usual_start = heartmonitor.HeartMonitor.start

    def start(monitor: Any) -> None:
        usual_start(monitor)
        usual, monitor.caller.callback_time = monitor.caller.callback_time, milliseconds
        monitor.loop.call_later(seconds, setattr, monitor.caller, "callback_time", usual)

    heartmonitor.HeartMonitor.start = start
