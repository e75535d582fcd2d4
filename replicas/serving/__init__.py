"""What serves: the gRPC server of a replica, and what it counts of the requests that it has taken."""
