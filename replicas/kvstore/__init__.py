"""KV beyond the device: which chunks lie in host memory and on disk, and how they move."""
