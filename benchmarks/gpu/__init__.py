"""The parts of `python -m benchmarks.gpu_check`; each runs by itself too: `python -m benchmarks.gpu.<part> --help`."""
