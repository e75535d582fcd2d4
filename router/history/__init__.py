"""Token-exact history: a conversation goes on from its own tokens, whatever its template makes of them."""
