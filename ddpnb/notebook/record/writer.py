"""Is the kernel that was writing a run still there?  (Notebook side.)"""

import platform

import psutil


def this_process() -> str:
    """Return host, process id and start time of this process, as the store keeps them."""
    process = psutil.Process()
    return f"{platform.node()} {process.pid} {process.create_time():.2f}"


def is_alive(writer: str) -> bool:
    """Return whether that process still runs; on another host nobody knows, so yes."""
    host, pid, started = writer.rsplit(" ", 2)
    if host != platform.node():
        return True
    try:
        process = psutil.Process(int(pid))
        has_ended = process.status() == psutil.STATUS_ZOMBIE  # its parent has not looked yet
        return not has_ended and f"{process.create_time():.2f}" == started
    except psutil.NoSuchProcess:
        return False
