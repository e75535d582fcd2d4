"""From the records of a run to what a person reads of it: figures, tables, plots, one page."""
