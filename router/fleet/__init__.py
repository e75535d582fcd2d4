"""The replicas as a router knows them: who is there, a stream to each, and what their caches hold."""
