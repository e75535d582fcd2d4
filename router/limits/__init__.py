"""How much a router takes on at a time, of all clients and of one address."""
