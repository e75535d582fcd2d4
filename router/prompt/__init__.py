"""The text side of a model: templates, tokenizers, and the block hashes of prompts."""
