"""Emulated devices: how fast each computes, and what lies between them.  (Every process.)

8            eight devices, each as fast as one idle core of this machine
8xV100       eight cards of a kind in ``CARDS``
16xV100/2    the same on two hosts
0.4ms/sample,2ms   the seconds of a sample, and of a forward and backward pass, however small

Where a model is named, ``--as resnet50``, time and bytes are those published for it on that card,
whatever is trained: see ``MODELS``.  ``docs/emulated-devices.md`` has each figure with its source.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ddpnb.protocol.errors import UserError, one_of
from ddpnb.protocol.notation import LINKS, SECONDS, LinkSpec, parse_link, parse_quantity, slower_of

MAX_DEVICES = 64
FORWARD_SHARE = 1 / 3
"""Of a step's computing: a backward pass has two matrix products for each of the forward pass
(Kaplan et al., "Scaling Laws for Neural Language Models", 2020, section 2.1)."""


class Compute(NamedTuple):
    """The seconds that a device needs for a model's forward and backward pass, or for a step."""

    per_sample: float
    fixed: float = 0.0
    """However few samples there are: launching its kernels, or calling its layers."""

    def of(self, num_samples: float) -> float:
        """Return those for so many samples."""
        return self.fixed + self.per_sample * num_samples

    @property
    def text(self) -> str:
        """As ``parse_compute`` reads it."""
        return f"{1e3 * self.per_sample:.6f}ms/sample,{1e3 * self.fixed:.6f}ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """A model with published figures."""

    num_parameters: int
    """In float32: four bytes of gradients for each."""
    num_tensors: int
    """Tensors that hold them."""
    compute: Mapping[str, Compute]
    """By card."""
    ddp_seconds: float = 0.0
    """What DDP itself adds to a step on one device: its hooks and the copies to its buckets."""


CARDS: Mapping[str, LinkSpec] = {
    "V100": LINKS["NVLink-V100"],
    "A100": LINKS["NVLink-A100"],
    "T4": LINKS["pcie3"],
}
"""The link between cards of a host."""

DDP_SECONDS_PER_TENSOR = 19e-6
"""What DDP adds to a step where no figure of the model itself is published."""
REPLICA_SECONDS_PER_TENSOR = 29e-6
"""What Python takes to call one replica of DataParallel; its threads take turns."""

HOST_LINK = LINKS["InfiniBand-EDR"]
"""Between hosts where no other is given."""

CORE_LINK = LinkSpec(bits_per_second=12e9, latency_seconds=50e-6)
"""Between devices that are as fast as a core: about what gloo reaches within a host."""

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
    """Empty: each is as fast as a core of this machine."""
    model: str = ""
    """Whose published figures stand for those of the model that is trained; empty: its own."""
    compute: Compute | None = None
    """None: it is measured, once for all strategies of a comparison."""
    device_link: LinkSpec = CORE_LINK
    """Between devices of one host."""
    host_link: LinkSpec = HOST_LINK

    @property
    def text(self) -> str:
        """For users: ``"8 emulated V100, resnet50's clock"``."""
        what = self.card or ("devices" if self.num > 1 else "device")
        hosts = f" on {self.num_hosts} hosts" if self.num_hosts > 1 else ""
        clock = f", {self.model}'s clock" if self.model else ""
        given = [] if self.device_link in _USUAL_LINKS else [self.device_link]
        given += [] if self.host_link == HOST_LINK else [self.host_link]
        links = f", over {' and '.join(link.text for link in given)}" if given else ""
        return f"{self.num} emulated {what}{hosts}{clock}{links}"

    @property
    def num_gradient_bytes(self) -> int:
        """Bytes of the gradients of the model that is emulated; 0: those of the one trained."""
        return 4 * MODELS[self.model].num_parameters if self.model else 0

    @property
    def wrapper_seconds(self) -> float:
        """What DDP itself adds to a step: its hooks, and the copies to its buckets."""
        if not self.model:
            return 0.0
        published = MODELS[self.model]
        return published.ddp_seconds or DDP_SECONDS_PER_TENSOR * published.num_tensors

    @property
    def seconds_per_replica(self) -> float:
        """What Python takes for each replica of DataParallel in a step, as threads take turns."""
        return REPLICA_SECONDS_PER_TENSOR * MODELS[self.model].num_tensors if self.model else 0.0

    @property
    def num_per_host(self) -> int:
        """How many devices a host has."""
        return -(-self.num // self.num_hosts)

    def link_between(self, ranks: Collection[int]) -> LinkSpec:
        """Return the link over which ranks exchange; a ring of several hosts has both."""
        if len({rank // self.num_per_host for rank in ranks}) < 2:
            return self.device_link
        return slower_of(self.device_link, self.host_link)


_DEVICES = re.compile(r"(\d+)(?:x([A-Za-z]\w*))?(?:/(\d+))?")

MEASURED = "real"
"""In place of devices: the time is measured, though the ranks were started for devices."""


def count_devices(text: str) -> tuple[int, str, int]:
    """Return the number of devices, the card and the number of hosts in ``"16xV100/2"``."""
    found = _DEVICES.fullmatch(text)
    if found is None:
        raise UserError(
            f"There are no devices {text!r}: write a number, 8, or a number of cards, 8xV100, and "
            "after a slash on how many hosts, 16xV100/2."
        )
    if not 1 <= int(found[1]) <= MAX_DEVICES:
        raise UserError(f"--devices {text}: emulate 1 to {MAX_DEVICES} devices.")
    if found[2] and found[2] not in CARDS:
        raise one_of("card", found[2], CARDS)
    num, num_hosts = int(found[1]), int(found[3] or 1)
    if num_hosts < 1 or num % num_hosts:
        raise UserError(f"--devices {text}: {num} devices cannot be shared by {num_hosts} hosts.")
    return num, found[2] or "", num_hosts


def parse_devices(
    text: str, *, model: str = "", compute: str = "", device_link: str = "", link: str = ""
) -> Devices:
    """Return the devices that the options name, as users write them."""
    num, card, num_hosts = count_devices(text)
    if card and not (model or compute):
        raise UserError(
            f"--devices {text} needs a model with published figures, --as {' | '.join(MODELS)}, "
            "or --compute 0.4ms/sample,2ms."
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
    per_sample = {f"{unit}/sample": seconds for unit, seconds in SECONDS.items()}
    each = parse_quantity(sample, per_sample)
    whole = parse_quantity(one_pass, SECONDS) if comma else 0.0
    if not (each > 0 and whole >= 0):
        raise UserError(
            f"--compute {text}: write the time of a sample and of a pass, 0.4ms/sample,2ms."
        )
    return Compute(each, whole)


def _published(model: str, card: str) -> Compute:
    if model not in MODELS:
        raise one_of("model for --as", model, MODELS)
    known = MODELS[model].compute
    if not card:
        raise UserError(f"--as {model} needs a card: --devices 8x{next(iter(known))}.")
    if card not in known:
        raise UserError(f"No figures of {model} on {card} are known, only on {', '.join(known)}.")
    return known[card]
