"""Who is served next while the fleet has less room than is asked for."""
