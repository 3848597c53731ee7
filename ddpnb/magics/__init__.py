"""The magics: text to options to one call of the session (kernel)."""
