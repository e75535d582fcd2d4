"""Salts: a prompt's roots in vLLM's block hashes and events.

vLLM hashes a request's salt with the first block. That is the root of the prompt's namespace, or of its
published beginning; then the namespace's own root is hashed with the block after that, which takes a patch of
vLLM (`core_view.py`). A salt is never sent anywhere: the engine core runs in this process.
"""

from replicas.protocol.blocks import BlockHash, PublishedBeginning
from replicas.protocol.frames import Submit


class PublishedSalt(str):
    """The published root, as vLLM reads it; `own_root` is the one from block `num_blocks` on."""

    own_root: str
    num_blocks: int
    """Counted in vLLM's hashes."""

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Pickle for vLLM's hash: only the published root, nothing about whose prompt it is."""
        return str, (str(self),)


def salt_of(submit: Submit, hashes_per_block: int = 1) -> str:
    """`hashes_per_block` are vLLM's in a block of the submit."""
    published = submit.published
    if published is None:
        return submit.root.hex()
    salt = PublishedSalt(published.root.hex())
    salt.own_root, salt.num_blocks = submit.root.hex(), published.num_blocks * hashes_per_block
    return salt


def roots_in(salt: str) -> tuple[BlockHash, PublishedBeginning | None]:
    """Parse a salt of `salt_of`."""
    first = BlockHash(bytes.fromhex(salt))
    if not isinstance(salt, PublishedSalt):
        return first, None
    return BlockHash(bytes.fromhex(salt.own_root)), PublishedBeginning(first, salt.num_blocks)
