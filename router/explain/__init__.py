"""Why a prompt was, or was not, read from cache: found by one piece of code, told in many places.

The pure core of explanations; `router/features/explanations` keeps and serves them. Of a prompt the router
keeps a chain in the prefix tree of its tenant (16 bytes per block, two per token), a record under the
request's ids, and digests of its tools, lines of instructions and messages; no text, and all of it within
`explain_bytes`. The live page shows the same trees. The causes are found when a prompt's usage is known, and
so is the nearest earlier prompt; if nothing can be lost to a change, that one is found when somebody asks.
The place in the client's body is searched only if tokens were lost, within 2 % of a processor. Only prompts
of the same tenant are compared; those under another salt only for keys with the right `explain`.
`docs/explain.md` has the rules that users see.
"""
