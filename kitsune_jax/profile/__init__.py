"""What this machine takes for the pieces that CPU plans are made of; measured once, kept on disk.

``python -m kitsune_jax.profile`` measures it again and prints it.
"""
