"""Who asks: tenants, their keys, what a key may do and how much of it, and what a tenant has used."""
