"""The functions of an exported script.  The kernel copies their source, but never imports them."""
