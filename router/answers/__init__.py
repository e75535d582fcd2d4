"""Turns tokens' text into parts, in no dialect's words: text, reasoning and tool calls.

Grammars: a client's wish for the form of an answer becomes one text in llguidance's notation: reasoning up to
its end mark, then the text, or calls in the template's own syntax. JSON has no spaces except after a comma or
colon, so an answer cannot end in endless spaces; properties come in the schema's order. Before any replica is
asked, the router compiles the grammar over a vocabulary of bytes and begins an answer, so a grammar that
cannot be followed is a 400 with field and reason. It does so in a child of the process for large bodies,
within 5 s of processor time and 192 MiB, which bound what llguidance itself does not. The router also bounds
the entries of arrays, which it writes out, and the depth of rules and references, which are followed on the
machine's stack. The text travels as `SamplingParams.grammar`, with its measured memory; `replicas/grammars/`
follows it.

Turns are fair: the tenant with the least compile time goes next, and none has all places
(`replicas/process/fair_line.py`). Only what a tenant's own grammar takes is reported as its fault. The
seconds count in the fair queue.
"""
