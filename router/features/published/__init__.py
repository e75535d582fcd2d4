"""Published prefixes: beginnings of prompts that an operator shares with every tenant.

Their whole blocks hash under a root of their own, and the chain continues under the prompt's root
(`Submit.published`), so tenants share exactly those blocks, on every tier and engine; in vLLM the second
root enters the hashes with the first block of the tenant's own. Salted prompts take no part. The list is
sealed in Redis; routers read it every 2 s, and no request waits.
"""
