"""Uses private parts of Python and torch that are global.  Runs on the ranks."""

import inspect
from typing import Any

import torch
from torch import _tensor_str

from ddpnb.compat.probe import Probe


@Probe("torch", "%ddp_run does not restore torch's options for printing")
def has_print_options() -> bool:
    """Return True if ddpnb can read the options of ``torch.set_printoptions``."""
    return {*vars(_tensor_str.PRINT_OPTS)} <= {
        *inspect.signature(torch.set_printoptions).parameters
    }


def print_options() -> dict[str, Any]:
    """Return the options of ``torch.set_printoptions``."""
    return {**vars(_tensor_str.PRINT_OPTS)} if has_print_options.works else {}
