"""The device cache: blocks, their users, and the prefix in each."""
