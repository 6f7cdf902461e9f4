"""The op table: what is known about each kind of op, one entry for each kind (``table.OPS``)."""
