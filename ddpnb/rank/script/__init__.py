"""The functions of an exported script.  The kernel copies this source, but never imports it."""
