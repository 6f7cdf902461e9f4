"""Code generation for one stage: from its instructions to nodes of the device IR, fitted into registers and shared memory."""
