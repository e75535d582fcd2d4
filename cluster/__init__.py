"""Ray: keep the fleet as specified."""
