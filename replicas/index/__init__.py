"""What writes a replica's share of the block index to Redis."""
