"""What a program does while it runs: ``timeline`` records the workers of pipelines, ``profile`` finds what binds a program."""
