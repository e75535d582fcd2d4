"""Bodies that take too long for the event loop, prepared in a process beside it."""
