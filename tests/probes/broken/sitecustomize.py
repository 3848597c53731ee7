"""Imported by every Python process that has this folder on its path."""

from tests.probes.breaks import break_all_on_import

break_all_on_import()
