#pragma once

#include "kernels/block_program.h"

namespace torchtp::kernels {

// What a plan runs on: the CPU here, a stream in block_program_cuda.h.
struct RunOnHost {
  size_t most_shared = kMostSharedBytes;  // of a block
  int multiprocessors = 3;

  template <typename Program>
  void program(const Program& program) const {
    run_on_host(program, most_shared);
  }
  // Independent work of one element each.
  template <typename Work>
  void each(const Work& work) const {
    for (int64_t i = 0; i < work.total(); ++i) work(i);
  }
};

}  // namespace torchtp::kernels
