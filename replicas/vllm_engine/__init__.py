"""vLLM behind the Engine protocol, in the engine thread.

Hashes: vLLM chains hashes of its own, from other inputs. Its events bring tokens and the parent's hash, and
our namespace root travels as `cache_salt`, so the translation computes our hash and keeps a map for as long
as vLLM holds the block in any tier. vLLM's block size, the hashing block size and the card's are one
number. The index thins by its stride as for any engine: with blocks of 32 and a stride of 128 every fourth
hash, with larger blocks every one, and always the last full block of a prompt. A LoRA adapter changes the
root and nothing else. vLLM's media GPU, CPU and STORAGE are our tiers device, host and disk. Copies are
counted per tier, and a hash is in the index while any tier holds it. A copy outside the device arrives
without a namespace. It takes its name from an earlier event of the device; if an earlier process left it,
from the event when it is read back.

Layers that cache differently: vLLM divides its cache into groups, and a hit ends where each group has what
it needs. The card's block size is what hits are multiples of; hashes and groups may have others. Events name
the blocks of a group with gaps, so a block is placed by its request's chain. From the copies of all groups
follow the resume points and the reach of full attention, exactly as vLLM looks them up: held to a slow rule
on random events, and to vLLM's scheduler over the groups of twenty shapes.

Tiers: with `host_kv_bytes` the tiers below vLLM are ours (`offloading.py`). vLLM's offloading connector
asks our store what is where, and our copier moves bytes between vLLM's blocks and chunks. A chunk is named
from its request's tokens, as the router names it, so nothing waits for vLLM's events. The store's events,
one per chunk, replace vLLM's own. A load may begin inside a chunk, at the first block that the device
lacks; a load of less than a chunk is not made. Reads from disk start when a request arrives, if reading
beats computing, and vLLM is told to ask again. A read that fails or takes too long is a miss; vLLM never
sees a load fail.
"""
