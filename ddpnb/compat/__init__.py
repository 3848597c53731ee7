"""All code that uses private parts of libraries, each with a probe.  Used in every process."""
