"""A server that takes no tokens: a client's body goes to it as read, and its answer comes back as it is.

Nothing is known of its cache but what was sent to it and what its answers say. So all that is predicted here
is called predicted.
"""
