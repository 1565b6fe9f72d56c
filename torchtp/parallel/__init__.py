"""`torchtp.parallelize`: what it makes of a module, of what goes in and comes out, of its parameters and random numbers."""
