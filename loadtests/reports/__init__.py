"""Turns the records of a run into figures, tables, plots and one page."""
