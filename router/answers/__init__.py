"""What a model has said, in no dialect's words: text, reasoning and tool calls, out of its tokens' text."""
