"""The functions of an exported script; the kernel copies their text and never imports them."""
