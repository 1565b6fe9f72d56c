#ifndef TORCHTP_BUILT_FOR_CUDA
#define TORCHTP_BUILT_FOR_CUDA "none"
#endif

// Read by torchtp/_extension.py from the bytes of the file, before it is loaded: against another torch the library
// would fail with an undefined symbol, or crash.
extern "C" __attribute__((used, visibility("default"))) const char torchtp_built_for[] =
    "torchtp was built for torch=" TORCHTP_BUILT_FOR_TORCH " cuda=" TORCHTP_BUILT_FOR_CUDA ";";
