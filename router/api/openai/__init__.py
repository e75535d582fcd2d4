"""OpenAI's chats and plain completions: bodies are read and answers written, with what vLLM's clients add."""
