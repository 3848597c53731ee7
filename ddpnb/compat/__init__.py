"""Every use of another library's private parts: one module per library, a probe for each use."""
