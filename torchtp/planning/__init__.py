"""What a training step on cut images would keep, send and gather, counted beforehand."""
