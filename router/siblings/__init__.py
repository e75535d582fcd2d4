"""What the routers of one cluster tell and ask each other, over Redis and in the background."""
