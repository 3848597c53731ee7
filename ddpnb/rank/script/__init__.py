"""The functions of an exported script.  The kernel copies their text and never imports them."""
