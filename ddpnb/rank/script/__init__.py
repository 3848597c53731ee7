"""The functions of an exported script.  The kernel copies their source and never imports it."""
