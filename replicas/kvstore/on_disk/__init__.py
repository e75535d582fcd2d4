"""Chunks in files: the folder, its journal, and the threads that read and write."""
