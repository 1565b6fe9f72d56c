"""Programs that measure torchtp beside what else does the same work: `python -m benchmarks.<name> --help`."""
