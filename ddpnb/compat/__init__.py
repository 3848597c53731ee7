"""Every touch of a private part of another library, each behind a probe."""
