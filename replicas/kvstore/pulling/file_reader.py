"""FileReader: reads chunks from the files of a disk that another part of the replica has open.

Owns nothing: a file may be removed at any time, and reading it then finds nothing. Bytes are used only after
their checksum matches.
"""

import os
from pathlib import Path

from replicas.kvstore.layout import FORMAT_VERSION, ChunkError, LayoutId, decode
from replicas.kvstore.on_disk.layout_folder import file_name
from replicas.protocol.blocks import BlockHash


class FileReader:
    """Reader for one folder and layout. Thread-safe."""

    def __init__(self, folder: Path, layout: LayoutId) -> None:
        self._root = folder / f"v{FORMAT_VERSION}" / layout.hex()
        self._layout = layout

    def copy(self, key: BlockHash, image: memoryview) -> bool:
        """Fill `image` with the chunk's file. False if there is no whole one. Raises OSError."""
        digits = key.hex()
        path = self._root / digits[:2] / digits[2:4] / file_name(key)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        try:
            done = 0
            while done < len(image) and (count := os.preadv(fd, [image[done:]], done)):
                done += count
        finally:
            os.close(fd)
        try:
            decode(image[:done], self._layout, key)
        except ChunkError:
            return False
        return done == len(image)
