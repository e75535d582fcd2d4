"""The cache itself: blocks, who uses them, and which prefix each one holds."""
