"""Exchange between the routers of one cluster, over Redis and in the background."""
