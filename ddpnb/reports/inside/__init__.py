"""Pictures and texts of what happens inside a step: pure functions of what was recorded."""
