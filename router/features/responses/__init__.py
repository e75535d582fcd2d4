"""Stored responses: questions and answers, kept for a while so that requests can continue from them."""
