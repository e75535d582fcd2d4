"""`kvasir loadtest NAME`: the load tests that have a name, from their plan to what they say in the end."""
