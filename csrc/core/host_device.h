#pragma once

// Marks a function that CPU code and kernels share; the CPU build then runs and tests the same arithmetic.
#ifdef __CUDACC__
#define TORCHTP_HOST_DEVICE __host__ __device__
#else
#define TORCHTP_HOST_DEVICE
#endif
