"""What runs in the notebook's kernel?  Never imports torch."""
