#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <string>

#include "core/error.h"
#include "kernels/block_program.h"
#include "kernels/device_limits_cuda.h"

// In place of csrc/kernels/block_program_cuda.h: a launch runs the blocks one after the other, at once.
namespace torchtp::kernels {

// Since the library was loaded.
std::atomic<int64_t>& num_launches();

template <typename Program>
void launch_program(const char* name, const Program& program, cudaStream_t) {
  const int64_t blocks = program.num_blocks();
  if (blocks == 0) return;
  if (blocks > INT32_MAX) throw Error(std::string(name) + ": " + std::to_string(blocks) + " blocks do not fit a grid");
  ++num_launches();
  run_on_host(program);
}

template <typename Work>
void launch_each(const char*, const Work& work, int64_t total, cudaStream_t) {
  if (total == 0) return;
  ++num_launches();
  for (int64_t i = 0; i < total; ++i) work(i);
}

struct RunOnDevice {
  const char* name;
  cudaStream_t stream;
  size_t most_shared = most_shared_bytes();
  int multiprocessors = kernels::multiprocessors();

  template <typename Program>
  void program(const Program& program) const {
    launch_program(name, program, stream);
  }
  template <typename Work>
  void each(const Work& work) const {
    launch_each(name, work, work.total(), stream);
  }
};

}  // namespace torchtp::kernels
