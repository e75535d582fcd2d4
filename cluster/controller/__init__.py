"""The detached controller: observe, plan, execute; and the replicas as actors of Ray."""
