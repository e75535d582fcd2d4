"""Compiles grammars for answers and follows them token by token, with llguidance.

The router writes one llguidance text per request and checks it (`router/answers/`). An engine compiles it
over the model's vocabulary in a thread, for `grammar_seconds` at most, while the request waits and lets
others pass. It compiles once per namespace: the time that a grammar takes would tell what other tenants ask
for. Tenants take turns by the least time used, and none may hold all places or half of the memory.

Memory: grammars in use have 4 GiB, counted as the router measured them, plus 48 MiB for the states that
answers may add to a grammar that counts or has patterns (`memory.py`). Each choice follows a copy of its
own and feeds it every token once, even if KV is computed again. A resumed choice starts from the output
that is there. Copies share states; a grammar that reaches its bound ends its answers with `length` and is
compiled anew for the next request.

Forbidden tokens are masked before any other step of sampling. A choice ends where nothing can follow; while
something can, `min_tokens` and `ignore_eos` cannot change that. vLLM is given the same copies in place of
its own backends. Router and replica share llguidance's bounds (`replicas/protocol/grammar_bounds.py`).
"""
