"""What does it cost?  Ratios, both sides measured in turns in one run."""
