"""An engine in a process of its own: both sides of the pipe."""
