"""Measurements of the library, each a command: `python -m benchmarks.<name> --help`."""
