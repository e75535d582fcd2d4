"""The text side of a model: templates, tokenizers, and the block hashes of prompts.

Chat templates are foreign code and may never end. Before a router compiles one, a child tries it on the
probe conversations. A template that does not end there costs the model its chats, not the router. On the
loop, templates run only under minijinja with fuel, and only if none of their instructions can make much of
little (`"x" * n`); all others, and all that jinja2 renders, run in the process for large bodies.

The trial also finds which form of content a template reads: some, of vision models, ignore plain text and
take lists of parts only, so they get parts. The two engines write some values differently: 1.0, 1e16,
integers beyond 64 bits, separators at the end of a text. A request in which a template moves such a value
is rendered by jinja2, and so are all requests of a template with a filter that differs. Replicas hand
templates out and never run them.
"""
