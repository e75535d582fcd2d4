"""The HTTP API: the core that all dialects share, with a folder for each of them.

A dialect has two pure ends: its body to one internal request, and the parts of an answer to its frames.
Everything between is shared.

Heads: before a body is read, on every route, a request may be refused by its head. 403: on loopback, a Host
that is neither loopback's nor in `allowed_hosts`; elsewhere, one outside `allowed_hosts` if that is set,
since a page can point its own name here; a browser's post for a page of another origin. (Under a public
name a JSON type passes, since browsers ask permission for it first and the router grants none.) 400: a key,
Host or cache group that comes twice. 415: a body that says it is not JSON, or is compressed. `priority`
counts only with `client_priority` or the key's right. Only HTTP/1 is spoken: a request that offers an
upgrade is served without.

Fields: each dialect's table says which fields are hints and which are refused; honoured fields are those of
its Struct. The decoder accepts these and nothing else, so a body of known fields is decoded once. Only a
body with others is decoded again, to refuse it, or to ignore and count them.
"""
