"""Is the kernel that was writing a run still there?  (Notebook side.)"""

import platform

from ddpnb import processes


def this_process() -> str:
    """Return host, process id and start time of this process, as the store keeps them."""
    pid, began = processes.process_id()
    return f"{platform.node()} {pid} {began:.2f}"


def is_alive(writer: str) -> bool:
    """Return whether that process still runs; on another host nobody knows, so yes."""
    host, pid, began = writer.rsplit(" ", 2)
    return host != platform.node() or processes.is_alive((int(pid), float(began)))
