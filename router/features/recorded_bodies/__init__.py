"""Recorded bodies: what clients send, appended to a file of the operator's for `kvasir lint`.

Off unless `record_bodies` names the file. Bodies are people's words, so only its owner may read it.
"""
