"""Makes all probes fail in every Python process that has this folder on its path."""

from ddpnb.compat.probe import Probe

Probe.works = property(lambda self: False)
