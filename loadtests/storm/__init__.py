"""`python -m loadtests.storm`: everything is killed in turn, while clients compare every answer."""
