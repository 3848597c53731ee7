"""Ranks on other hosts: starts, connects and ends the processes on these hosts."""
