"""From a generation to its last token: which replica gets it, and what happens when one is lost."""
