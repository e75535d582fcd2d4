"""From a generation to its last token: which replica gets it, and what happens when one is lost.

A request is retried elsewhere before its first token and resumed elsewhere after it. Retries at living
replicas are a share of the traffic: one per five requests, ten per second, bursts of 200. What a death
interrupted is always tried again, after a random delay.

Prompts that kill: when a replica dies, the router blames the prompt that was on trial there. Without one it
blames its own prompts that were new to the replica (fewer than four tokens of each choice had arrived,
early enough in line for its last two steps, not just computed at a living replica), and without those the
ones that ran, if they were few. A blamed prompt is remembered for ten minutes by a keyed digest of its
tokens, and tried once more at a replica without another suspect. Four tokens clear it; a second death
condemns it: it is a 500 however it is asked again, with other choices, seeds or salts. While replicas also
die without a suspect, three deaths are needed, so a storm of kills condemns no innocent prompt.

Waiting: while a model has no ready replica, but one was routed to within two minutes or one with a lease is
being connected, its requests wait in order of arrival, bounded by `max_waiting`, `max_waiting_bytes` and
`wait_seconds`. They are released one by one when a replica comes and each time it reports its load, until
it has two full batches. Beyond the bounds the answer is 503; `retry-after` is how long there has been no
replica, or what the idlest one needs for its prompts, between 1 and 60 seconds.
"""
