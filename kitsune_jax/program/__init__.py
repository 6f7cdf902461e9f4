"""The tile program (``ir``, ``instructions``), its builder (``build``), loops over blocks (``blocks``), and passes (``passes``)."""
