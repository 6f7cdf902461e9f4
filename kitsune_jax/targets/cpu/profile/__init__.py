"""How long the pieces take on this machine that CPU plans are made of: measured once, kept on disk."""
