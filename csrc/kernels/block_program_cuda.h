#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "core/error.h"
#include "kernels/block_program.h"
#include "kernels/device_limits_cuda.h"

// The same programs on the device; included by .cu files only. See block_program.h.
namespace torchtp::kernels {

template <typename Partial>
__device__ __forceinline__ Partial from_lane(const Partial& mine, int offset) {
  static_assert(sizeof(Partial) % 4 == 0, "a partial result travels in words of 4 bytes");
  constexpr int kWords = sizeof(Partial) / 4;
  uint32_t words[kWords];
  memcpy(words, &mine, sizeof(Partial));
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = __shfl_xor_sync(0xffffffffu, words[i], offset);
  Partial other;
  memcpy(&other, words, sizeof(Partial));
  return other;
}

template <typename Program>
__device__ __forceinline__ void reduce_team(const Program& program, typename Program::State& state) {
  using Partial = std::decay_t<decltype(state.partial)>;
  const int team = program.team, apart = program.apart;
  Partial mine = state.partial;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    if (offset < apart || offset >= team) continue;
    const Partial other = from_lane(mine, offset);
    mine = !Commutes<Program>::value && threadIdx.x & offset ? Program::combine(other, mine)
                                                             : Program::combine(mine, other);
  }
  if constexpr (MostTeam<Program>::value > 32) {
    if (team > 32) {
      __shared__ Partial of_warp[Program::kThreads / 32][32];
      static_assert(sizeof(of_warp) == static_shared_bytes<Program>());
      const int lane = threadIdx.x % apart;
      if (threadIdx.x % 32 == lane) of_warp[threadIdx.x / 32][lane] = mine;
      __syncthreads();
      const int first = threadIdx.x / team * (team / 32);
      mine = of_warp[first][lane];
      for (int warp = 1; warp < team / 32; ++warp) mine = Program::combine(mine, of_warp[first + warp][lane]);
      __syncthreads();
    }
  }
  state.partial = mine;
}

template <int kPhase, typename Program>
__device__ __forceinline__ void run_phase(const Program& program, const Place& place, int step,
                                          typename Program::State& state, void* shared) {
  program.template run<kPhase>(place, step, state, shared);
  if constexpr (Program::reduces(kPhase)) reduce_team(program, state);
  constexpr bool kSteps = Program::kPhases == FirstPhases<Program>::value + Program::kStepPhases;
  constexpr bool kLast = kPhase + 1 == Program::kPhases && !kSteps;
  constexpr Meeting kMeeting = Meetings<Program>::after(kPhase);
  if constexpr (!kLast && kMeeting == Meeting::kBlock) __syncthreads();
  if constexpr (!kLast && kMeeting == Meeting::kWarp) __syncwarp();
}

template <int kFirst, typename Program, int... kPhases>
__device__ __forceinline__ void run_phases(const Program& program, const Place& place, int step,
                                           typename Program::State& state, void* shared,
                                           std::integer_sequence<int, kPhases...>) {
  (run_phase<kFirst + kPhases>(program, place, step, state, shared), ...);
}

template <typename Program>
__global__ void __launch_bounds__(Program::kThreads, Program::kBlocksPerSm)
    block_program_kernel(const __grid_constant__ Program program) {
  extern __shared__ float4 shared[];
  const Place place{static_cast<int64_t>(blockIdx.x), static_cast<int>(threadIdx.x)};
  typename Program::State state{};
  constexpr int kFirst = FirstPhases<Program>::value, kLast = kFirst + Program::kStepPhases;
  run_phases<0>(program, place, 0, state, shared, std::make_integer_sequence<int, kFirst>());
  const int steps = program.num_steps(place.block);
  for (int step = 0; step < steps; ++step) {
    run_phases<kFirst>(program, place, step, state, shared, std::make_integer_sequence<int, Program::kStepPhases>());
  }
  run_phases<kLast>(program, place, 0, state, shared, std::make_integer_sequence<int, Program::kPhases - kLast>());
}

inline void require_launched(const char* name, cudaError_t status) {
  if (status != cudaSuccess) throw Error(std::string(name) + ": launch refused: " + cudaGetErrorString(status));
}

template <typename Program>
void launch_program(const char* name, const Program& program, cudaStream_t stream) {
  const int64_t blocks = program.num_blocks();
  if (blocks == 0) return;  // a grid of zero blocks is a launch error
  if (blocks > INT32_MAX) throw Error(std::string(name) + ": " + std::to_string(blocks) + " blocks do not fit a grid");
  const auto kernel = &block_program_kernel<Program>;
  const size_t bytes = program.shared_bytes();
  if (needs_leave(bytes)) {
    // For the most there is: a thread that asks for less would take leave from one that is about to launch with more.
    require_launched(name, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                static_cast<int>(std::max(bytes, most_shared_bytes()))));
  }
  kernel<<<static_cast<unsigned>(blocks), Program::kThreads, bytes, stream>>>(program);
  require_launched(name, cudaGetLastError());
}

// Independent work of one element each: `work(i)` for i < total.
template <typename Work>
__global__ void __launch_bounds__(256) each_element_kernel(const __grid_constant__ Work work, int64_t total) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < total; i += step) work(i);
}

template <typename Work>
void launch_each(const char* name, const Work& work, int64_t total, cudaStream_t stream) {
  if (total == 0) return;
  constexpr int64_t kMaxBlocks = 1 << 20;
  const int64_t blocks = (total + 255) / 256 < kMaxBlocks ? (total + 255) / 256 : kMaxBlocks;
  each_element_kernel<<<static_cast<unsigned>(blocks), 256, 0, stream>>>(work, total);
  require_launched(name, cudaGetLastError());
}

// What a plan runs on; see run_on_host.h.
struct RunOnDevice {
  const char* name;  // for errors
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
