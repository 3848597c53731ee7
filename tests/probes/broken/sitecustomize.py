"""Imported by every Python process that has this folder on its path: all probes fail in it."""

from ddpnb.compat.probe import Probe

Probe.works = property(lambda self: False)
