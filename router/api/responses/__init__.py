"""OpenAI's Responses: how a body is read and an answer written."""
