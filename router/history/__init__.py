"""Token-exact history: a conversation goes on from its own tokens, whatever its template makes of them.

The prompt of a next turn begins with the tokens of earlier answers exactly as they were generated. The
router that generated an answer knows them. For the others it writes a sealed record to Redis, in the
background, under a key of the conversation: a hash rolled over its messages from its namespace's root, so
no other tenant can name it. A record has the answer's tokens, the mark of the record before, and a hash and
the last tokens of the prompt between the two.

A router that does not know a conversation's last answer reads the records of all its answers in one call of
at most 20 ms. It locates the prompts between them in what the template writes now, in order and by hash,
and accepts an answer only if its tokens read as the message that came back. So a record can add nothing to
a prompt that the conversation does not contain, except that answer's reasoning. What cannot be located (a
template that writes earlier messages differently later) is a miss. What was learnt is remembered, and
written again when it is used after half its time or after Redis lost it.

Bounds: each tenant has a log of bytes without a counter that could drift. A record's place is the byte
where it begins; a tenant holds the bytes between its oldest record and the end. After each 64th of the room
written, a router removes the oldest records of the tenants that hold most; if that fails it writes nothing.
If Redis is late, one request loses 20 ms, and no other asks until Redis has answered in time in the
background. Asking the other routers directly would not outlive the router that answered. `docs/routers.md`
has what users see.
"""
