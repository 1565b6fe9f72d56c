#pragma once

// All that the launchers' headers take from CUDA.
using cudaStream_t = void*;
