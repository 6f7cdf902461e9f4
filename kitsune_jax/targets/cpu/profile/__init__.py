"""A machine's profile, the measured times of the pieces of work that CPU plans consist of: measured once, kept on disk."""
