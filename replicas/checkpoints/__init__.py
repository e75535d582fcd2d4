"""Model directories on disk, read without any engine: config, weights, text files, fingerprint."""
