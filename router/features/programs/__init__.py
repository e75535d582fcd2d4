"""Agents as programs as a feature: names the program of each request, and keeps the routers' books alike.

What is known of a program is `router/programs/`', and which may run is decided in `router/queue/gate.py`.
Off, no header is read for it, and each request is one by itself.
"""
