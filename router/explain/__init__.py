"""Why a prompt was, or was not, read from cache: found by one piece of code, told in many places.

Every request has a short explanation for its owner. Of a prompt the router keeps a chain in a radix tree of
its tenant (16 bytes per block, two per token), a record under the request's ids, and digests of its tools,
lines of instructions and messages; no text, and all of it within `explain_bytes`. The causes are found when
a prompt's usage is known, and so is the nearest earlier prompt; if nothing can be lost to a change, that one
is found when somebody asks. The place in the client's body takes at most 2 % of a processor. Only prompts of
the same tenant are compared; those under another salt only for keys with the right `explain`. An explanation
that another router has is fetched from it when a client asks for it, and costs nothing until then.
`docs/explain.md` has the rules that users see.
"""
