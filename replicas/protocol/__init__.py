"""The contract of replicas, router and index: what they must read, write and compute alike."""
