"""Plans timed on the machine at hand: ``choice`` decides between them, ``inputs`` makes the arguments that they run on."""
