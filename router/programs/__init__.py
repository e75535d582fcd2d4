"""Agents as programs: chains of turns under one name, where they run, and which of them may run at once.

Pure. How a client's headers name a program is `router/features/programs/`' own.
"""
