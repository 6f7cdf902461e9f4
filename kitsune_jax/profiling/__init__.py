"""Measurements of a running program: ``timeline`` records the workers of pipelines, ``profile`` finds the bound of a program."""
