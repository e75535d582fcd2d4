"""The page at `/`: what it shows of the fleet, the prefixes and the last decisions, as data; its files."""
