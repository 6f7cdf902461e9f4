"""From the instructions of one stage to nodes of the device IR, fitted into registers and shared memory."""
