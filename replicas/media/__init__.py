"""Images of prompts inside a replica: taken once, read beside the engine, kept by their hashes."""
