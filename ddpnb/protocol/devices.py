"""Emulated devices: the speed of each device and the links between them.  Used in every process.

8            eight devices, each as fast as one idle core of this machine
8xV100       eight V100 cards; ``CARDS`` lists the cards
16xV100/2    sixteen V100 cards on two hosts
0.4ms/sample,2ms   the time per sample, and the fixed time per forward and backward pass

With ``--as resnet50``, ddpnb uses the published time and bytes of resnet50 for any trained model:
see ``MODELS``.  ``docs/emulated-devices.md`` lists the source of each value.
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ddpnb.protocol.errors import UserError, one_of
from ddpnb.protocol.notation import (
    LINKS,
    TIME_UNITS,
    LinkSpec,
    parse_link,
    parse_quantity,
    slower_of,
)

MAX_DEVICES = 64
FORWARD_SHARE = 1 / 3
"""The forward pass's share of the compute time.  This pass has half as many matrix products as the
backward pass (Kaplan et al., "Scaling Laws for Neural Language Models", 2020, section 2.1)."""
LEAST_PER_SAMPLE = 1e-9
"""Minimum seconds per sample of a measured device."""


class Compute(NamedTuple):
    """The time that a device needs for a forward and a backward pass, or for a step, in seconds."""

    per_sample: float
    fixed: float = 0.0
    """Seconds that do not depend on the number of samples, e.g. to launch kernels."""

    def of(self, num_samples: float) -> float:
        """Return the seconds for a number of samples."""
        return self.fixed + self.per_sample * num_samples

    @classmethod
    def fitted(cls, seconds: Mapping[int, float]) -> "Compute":
        """Return the time that fits measured steps of one or two sizes.  No value is negative.

        ``seconds`` maps numbers of samples to seconds.  If only one size was measured, or if the
        time per sample grows with the size, the time is proportional to the number of samples.
        """
        (few, short), (many, long) = min(seconds.items()), max(seconds.items())
        slope = (long - short) / (many - few) if few < many else math.inf
        per_sample = max(min(slope, long / many), LEAST_PER_SAMPLE)
        return cls(per_sample, max(0.0, long - many * per_sample))

    @property
    def text(self) -> str:
        """The notation that ``parse_compute`` reads."""
        return f"{1e3 * self.per_sample:.6f}ms/sample,{1e3 * self.fixed:.6f}ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """A model with a published size and compute time."""

    num_parameters: int
    """The number of float32 parameters.  Each parameter's gradient has four bytes."""
    num_tensors: int
    compute: Mapping[str, Compute]
    ddp_seconds: float = 0.0
    """Seconds that DDP adds to a step on one device, for hooks and copies to buckets."""


CARDS: Mapping[str, LinkSpec] = {
    "V100": LINKS["NVLink-V100"],
    "A100": LINKS["NVLink-A100"],
    "T4": LINKS["pcie3"],
}
"""The link between the cards of one host, by the card's name."""

DDP_SECONDS_PER_TENSOR = 19e-6
"""Seconds per tensor that DDP adds to a step of a model without a published ``ddp_seconds``."""
REPLICA_SECONDS_PER_TENSOR = 29e-6
"""Seconds per tensor to call one DataParallel replica in Python.  Replicas' threads take turns."""

HOST_LINK = LINKS["InfiniBand-EDR"]
"""The default link between hosts."""

CORE_LINK = LinkSpec(bits_per_second=12e9, latency_seconds=50e-6)
"""The default link between devices without a card.  The link is about as fast as gloo in a host."""

_USUAL_LINKS = (CORE_LINK, *CARDS.values())

MODELS: Mapping[str, PublishedModel] = {
    "resnet18": PublishedModel(
        num_parameters=11_689_512,
        num_tensors=62,
        compute={
            "V100": Compute(0.82e-3, 3.6e-3),
            "T4": Compute(2.92e-3),
            "A100": Compute(0.29e-3, 12.7e-3),
        },
    ),
    "resnet50": PublishedModel(
        num_parameters=25_557_032,
        num_tensors=161,
        compute={
            "V100": Compute(2.74e-3, 9.3e-3),
            "T4": Compute(9.78e-3),
            "A100": Compute(0.97e-3, 24.7e-3),
        },
        ddp_seconds=3e-3,
    ),
    "resnet101": PublishedModel(
        num_parameters=44_549_160,
        num_tensors=314,
        compute={"V100": Compute(5.06e-3)},
        ddp_seconds=9e-3,
    ),
    "gpt2-small": PublishedModel(
        num_parameters=124_439_808, num_tensors=148, compute={"A100": Compute(4.69e-3)}
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """Emulated devices, one for each rank."""

    num: int
    num_hosts: int = 1
    card: str = ""
    """The card of each device.  If empty, each device is as fast as a core of this machine."""
    model: str = ""
    """The published model that the trained model imitates; empty if it does not imitate a model."""
    compute: Compute | None = None
    """The compute time.  If None, ddpnb measures the time once for all strategies."""
    device_link: LinkSpec = CORE_LINK
    host_link: LinkSpec = HOST_LINK

    @property
    def text(self) -> str:
        """The description for users: ``"8 emulated V100 running resnet50"``."""
        what = self.card or ("devices" if self.num > 1 else "device")
        hosts = f" on {self.num_hosts} hosts" if self.num_hosts > 1 else ""
        clock = f" running {self.model}" if self.model else ""
        given = [] if self.device_link in _USUAL_LINKS else [self.device_link]
        given += [] if self.host_link == HOST_LINK else [self.host_link]
        links = f", over {' and '.join(link.text for link in given)}" if given else ""
        return f"{self.num} emulated {what}{hosts}{clock}{links}"

    @property
    def num_gradient_bytes(self) -> int:
        """The number of gradient bytes of the published model; 0 without a published model."""
        return 4 * MODELS[self.model].num_parameters if self.model else 0

    @property
    def wrapper_seconds(self) -> float:
        """Seconds that DDP adds to a step, for hooks and copies to buckets.

        Other strategies that copy all gradients or weights to buffers need the same time.
        """
        if not self.model:
            return 0.0
        published = MODELS[self.model]
        return published.ddp_seconds or DDP_SECONDS_PER_TENSOR * published.num_tensors

    @property
    def seconds_per_replica(self) -> float:
        """Seconds per step that Python needs to call one replica of DataParallel."""
        return REPLICA_SECONDS_PER_TENSOR * MODELS[self.model].num_tensors if self.model else 0.0

    @property
    def backend(self) -> str:
        """The backend whose algorithms the devices use: NCCL for cards, and otherwise the usual."""
        return "nccl" if self.card else ""

    @property
    def num_per_host(self) -> int:
        """The largest number of devices on one host."""
        return -(-self.num // self.num_hosts)

    def link_between(self, ranks: Collection[int]) -> LinkSpec:
        """Return the link between ranks.  Between hosts, use the slower values of the two links."""
        if len({rank // self.num_per_host for rank in ranks}) < 2:
            return self.device_link
        return slower_of(self.device_link, self.host_link)


_DEVICES = re.compile(r"(\d+)(?:x([A-Za-z]\w*))?(?:/(\d+))?")

MEASURED = "real"
"""The value of ``--devices`` that turns emulation off, so that ddpnb measures the times."""


def count_devices(text: str) -> tuple[int, str, int]:
    """Return the number of devices, the card and the number of hosts in ``"16xV100/2"``."""
    found = _DEVICES.fullmatch(text)
    if found is None:
        raise UserError(
            f"{text!r} does not describe devices. Write a number of devices (8) or of cards "
            "(8xV100). Add the number of hosts after a slash (16xV100/2)."
        )
    if not 1 <= int(found[1]) <= MAX_DEVICES:
        raise UserError(f"--devices {text} is not possible. Emulate 1 to {MAX_DEVICES} devices.")
    if found[2] and found[2] not in CARDS:
        raise one_of("card", found[2], CARDS)
    num, num_hosts = int(found[1]), int(found[3] or 1)
    if num_hosts < 1 or num % num_hosts:
        raise UserError(
            f"--devices {text} cannot put the same number of devices on each host. Change the "
            "number of devices or of hosts."
        )
    return num, found[2] or "", num_hosts


def parse_devices(
    text: str, *, model: str = "", compute: str = "", device_link: str = "", link: str = ""
) -> Devices:
    """Return the devices that a user's options describe."""
    num, card, num_hosts = count_devices(text)
    if card and not (model or compute):
        raise UserError(
            f"--devices {text} needs a model's compute time. Add --as {' | '.join(MODELS)}, or "
            "give the time with --compute 0.4ms/sample,2ms."
        )
    published = _published(model, card) if model else None
    within = device_link or (link if num_hosts == 1 else "")
    between = link if num_hosts > 1 or device_link else ""
    return Devices(
        num=num,
        num_hosts=num_hosts,
        card=card,
        model=model,
        compute=parse_compute(compute) if compute else published,
        device_link=parse_link(within) if within else CARDS.get(card, CORE_LINK),
        host_link=parse_link(between) if between else HOST_LINK,
    )


def parse_compute(text: str) -> Compute:
    """Parse ``0.4ms/sample`` or ``0.4ms/sample,2ms``."""
    sample, comma, one_pass = text.partition(",")
    per_sample = {f"{unit}/sample": seconds for unit, seconds in TIME_UNITS.items()}
    each = parse_quantity(sample, per_sample)
    whole = parse_quantity(one_pass, TIME_UNITS) if comma else 0.0
    if not (each > 0 and whole >= 0):
        raise UserError(
            f"--compute {text} is not valid. Write the time per sample and per pass, such as "
            "0.4ms/sample,2ms."
        )
    return Compute(each, whole)


def _published(model: str, card: str) -> Compute:
    if model not in MODELS:
        raise one_of("model for --as", model, MODELS)
    known = MODELS[model].compute
    if not card:
        raise UserError(f"--as {model} needs a GPU model. Add --devices 8x{next(iter(known))}.")
    if card not in known:
        raise UserError(
            f"ddpnb has no published time for {model} on {card}. Use {' or '.join(known)}."
        )
    return known[card]
