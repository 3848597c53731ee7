"""The magics: each parses its line and calls a function of the session (kernel)."""
