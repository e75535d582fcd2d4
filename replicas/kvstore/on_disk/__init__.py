"""Chunks in files: the folder, its journal, and the threads that read and write.

Folder: one replica owns it, locks it while in use, and marks it as a cache of Kvasir's. Folders are 0700,
files 0600. A foreign folder, a second replica, or a file system without locks or renaming is refused at
start. Ownership follows from owner and mode, not from the mark, which anybody can copy: `v1` and everything
below it is used only if it belongs to the replica's user and no other user can reach it. `kv_folder` itself
may be a volume of root's with group write.

Files: a chunk is `v1/LAYOUT/ab/cd/KEY.kv`, the image of a slot of host memory: a header of 4,096 bytes,
then the payload. LAYOUT is a digest of everything that KV must agree in to be readable: engine and version,
byte order, attention backend, type, shape, block, chunk, tensor parallel size. Model, adapter, tenant and
salt are in the key, a block hash. Files of other layouts are never read; the layout unused for longest goes
first when room is needed. Files are written under another name and renamed, without a sync unless a lease
is long. That is safe, because no byte is used before its checksum (xxh3_128 over header and payload)
matches: a torn, changed, foreign or missing file is a miss and is removed. The checksum finds accidents,
not attacks: encrypt the volume.

Journal: `journal.log` has the names in LRU order and the ends of leases, in records of 64 bytes with a CRC
each. It only speeds up the start. The folder is compared with it afterwards, in a tenth of a thread's time;
names that it lacks are found by walking, names without a file are dropped, and a bad record costs only
itself.

Threads: the engine's thread submits jobs and collects results. Reads come before removals before writes;
jobs for one chunk keep their order. The queue, the bytes and each read's time are bounded. O_DIRECT is used
where the file system can do it. Speeds come from a probe at start and from every transfer since; nothing
waits for the disk until a speed is known. A hanging thread is replaced; when the replacements hang too, the
disk is left alone until one returns.
"""
