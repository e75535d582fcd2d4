"""OpenAI's Responses: how a body is read and an answer written, and what goes on from a stored one."""
