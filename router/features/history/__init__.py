"""Token-exact history as a feature: what a router remembers, and how routers share it (`router/history/`)."""
