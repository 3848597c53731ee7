"""Ranks on other hosts: the processes there, and how the kernel starts, reaches and ends them."""
