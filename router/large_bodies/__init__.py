"""Bodies that take too long for the event loop, prepared in a process beside it.

No body may block the loop. A light body has at most 256 KiB and 4,096 JSON values, counted in its bytes
before anything is decoded: it is decoded, checked and rendered on the loop, and only long new text is
encoded in a thread. Any other body goes to a process beside the router that has each model's tokenizer and
template and forks a child per body, within 10 s of processor time, 60 s and 384 MiB. The kernel ends a
child beyond that, and the request is a 400. Two bodies are prepared at once, 64 wait for at most 10 s, then
503.

The result is token ids and the fields that tell how to continue, so the loop's own work is bounded by the
context. Work for many prompts is done in slices of 2 ms, one slice of all requests per pass of the loop. A
child ends when its client leaves, and its resources are returned.
"""
