"""Stored responses: what was asked and answered, kept for a while so that requests can go on."""
