"""The magics, which parse their lines and call functions of the session.  Runs in the kernel."""
