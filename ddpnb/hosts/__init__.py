"""Starts, connects and ends the processes of ranks on other hosts."""
