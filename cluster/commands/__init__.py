"""The commands of `kvasir`, one file each, and what they say."""
