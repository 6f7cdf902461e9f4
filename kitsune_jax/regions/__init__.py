"""Legal and profitable subgraphs, and the reasons for every "no"."""
