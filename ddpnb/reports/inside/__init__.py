"""Pictures and texts of events inside a step: pure functions of recorded data (kernel)."""
