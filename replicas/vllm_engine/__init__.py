"""vLLM behind the Engine protocol, in the engine thread."""
