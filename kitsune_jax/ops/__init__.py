"""The op table, one entry for each kind of op (``table.OPS``), and the Graph that its ops form."""
