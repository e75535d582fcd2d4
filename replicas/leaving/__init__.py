"""What a replica does for others before it leaves: what it has leased goes to those that stay."""
