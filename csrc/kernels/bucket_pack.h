#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/block_program.h"
#include "kernels/vectors.h"

// Gradients of a bucket: many tensors to and from one flat buffer with a scale and a cast, in one launch; and the flat
// buffer's part of the global norm.
namespace torchtp::kernels {

struct BucketTensor {
  void* data;     // dense
  int64_t begin;  // first element in the flat buffer
  int64_t count;
};

// What a launch carries in its parameters; a bucket of more tensors takes several launches.
struct BucketTable {
  static constexpr int kMostTensors = 512;
  static constexpr int64_t kChunk = 8192;  // elements of a block

  int32_t num_tensors = 0;
  int32_t first_block[kMostTensors + 1] = {};
  BucketTensor tensors[kMostTensors] = {};

  // Takes tensors from `all`, beginning with `next`, which it moves on.
  static BucketTable take(const std::vector<BucketTensor>& all, size_t& next) {
    BucketTable table;
    for (; next < all.size() && table.num_tensors < kMostTensors; ++next) {
      const int64_t blocks = (all[next].count + kChunk - 1) / kChunk;
      if (blocks == 0) continue;
      table.tensors[table.num_tensors] = all[next];
      table.first_block[table.num_tensors + 1] = table.first_block[table.num_tensors] + static_cast<int32_t>(blocks);
      ++table.num_tensors;
    }
    return table;
  }

  TORCHTP_HOST_DEVICE int32_t tensor_of(int32_t block) const {
    int32_t low = 0, high = num_tensors - 1;
    while (low < high) {
      const int32_t middle = (low + high + 1) / 2;
      if (first_block[middle] <= block) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }
};

// Tensors of type T, a flat buffer of type F. Scaled by `scale`, and by `*device_scale` if that is not null (as a
// clipping factor is, which only the device knows).
template <typename T, typename F, bool kPack>
struct BucketMove : NoTeams {
  static constexpr int kThreads = 256, kBlocksPerSm = 4;
  static constexpr int kStepPhases = 1, kPhases = 1;
  static constexpr int kVector = 4;
  using State = NoState;

  F* flat;
  float scale;
  const float* device_scale;
  BucketTable table;

  int64_t num_blocks() const { return table.first_block[table.num_tensors]; }
  size_t shared_bytes() const { return 0; }
  TORCHTP_HOST_DEVICE int num_steps(int64_t) const { return 1; }

  template <int kPhase>
  TORCHTP_HOST_DEVICE void run(const Place& place, int, State&, void*) const {
    const auto block = static_cast<int32_t>(place.block);
    const int32_t index = table.tensor_of(block);
    const BucketTensor& tensor = table.tensors[index];
    const int64_t first = (block - table.first_block[index]) * BucketTable::kChunk;
    const int64_t left = tensor.count - first, count = left < BucketTable::kChunk ? left : BucketTable::kChunk;
    T* const data = static_cast<T*>(tensor.data) + first;
    F* const line = flat + tensor.begin + first;
    const float factor = device_scale ? scale * *device_scale : scale;
    const bool wide = reinterpret_cast<uintptr_t>(data) % (kVector * sizeof(T)) == 0 &&
                      reinterpret_cast<uintptr_t>(line) % (kVector * sizeof(F)) == 0;
    const int64_t in_vectors = wide ? count / kVector * kVector : 0;
#pragma unroll 4
    for (int64_t i = place.thread * kVector; i < in_vectors; i += kThreads * kVector) {
      if constexpr (kPack) {
        move(*reinterpret_cast<const Pack<T, kVector>*>(data + i), *reinterpret_cast<Pack<F, kVector>*>(line + i),
             factor);
      } else {
        move(*reinterpret_cast<const Pack<F, kVector>*>(line + i), *reinterpret_cast<Pack<T, kVector>*>(data + i),
             factor);
      }
    }
    for (int64_t i = in_vectors + place.thread; i < count; i += kThreads) {
      if constexpr (kPack) {
        line[i] = static_cast<F>(static_cast<float>(data[i]) * factor);
      } else {
        data[i] = static_cast<T>(static_cast<float>(line[i]) * factor);
      }
    }
  }

 private:
  template <typename From, typename To>
  static TORCHTP_HOST_DEVICE void move(const Pack<From, kVector>& from, Pack<To, kVector>& to, float factor) {
    Pack<To, kVector> result;
#pragma unroll
    for (int k = 0; k < kVector; ++k) result.values[k] = static_cast<To>(static_cast<float>(from.values[k]) * factor);
    to = result;
  }
};

// Of each block: the sum of squares of its elements and how many of them are not finite.
struct NormPart {
  double squares;
  double not_finite;
};

// For programs whose block adds up such parts.
struct NormTeams {
  struct State {
    NormPart partial;
  };
  static constexpr bool reduces(int phase) { return phase == 0; }
  static TORCHTP_HOST_DEVICE NormPart combine(const NormPart& low, const NormPart& high) {
    return {low.squares + high.squares, low.not_finite + high.not_finite};
  }
};

template <typename F>
struct BucketNorm : NormTeams {
  static constexpr int kThreads = 256, kBlocksPerSm = 4;
  static constexpr int kStepPhases = 2, kPhases = 2, team = kThreads, apart = 1;
  static constexpr int64_t kChunk = 32768;

  const F* flat;
  int64_t count;
  NormPart* parts;  // [num_blocks]

  int64_t num_blocks() const { return (count + kChunk - 1) / kChunk; }
  size_t shared_bytes() const { return 0; }
  TORCHTP_HOST_DEVICE int num_steps(int64_t) const { return 1; }

  template <int kPhase>
  TORCHTP_HOST_DEVICE void run(const Place& place, int, State& state, void*) const {
    if constexpr (kPhase == 0) {
      constexpr int kVector = 16 / sizeof(F);
      const F* const from = flat + place.block * kChunk;
      const int64_t left = count - place.block * kChunk, here = left < kChunk ? left : kChunk;
      const int64_t in_vectors = reinterpret_cast<uintptr_t>(flat) % 16 == 0 ? here / kVector * kVector : 0;
      float squares = 0, bad = 0;  // of at most 128 elements
#pragma unroll 4
      for (int64_t i = place.thread * kVector; i < in_vectors; i += kThreads * kVector) {
        const auto pack = *reinterpret_cast<const Pack<F, kVector>*>(from + i);
#pragma unroll
        for (int k = 0; k < kVector; ++k) add(static_cast<float>(pack.values[k]), squares, bad);
      }
      for (int64_t i = in_vectors + place.thread; i < here; i += kThreads)
        add(static_cast<float>(from[i]), squares, bad);
      state.partial = {squares, bad};
    } else if (place.thread == 0) {
      parts[place.block] = state.partial;
    }
  }

 private:
  static TORCHTP_HOST_DEVICE void add(float value, float& squares, float& bad) {
    squares += value * value;
    bad += value - value == 0 ? 0.0f : 1.0f;  // inf and NaN leave NaN
  }
};

struct ClipResult {
  float norm;
  float factor;      // that makes the norm at most `most`
  float not_finite;  // 1 if any element was not finite
};

// From the parts of all buckets.
struct ClipFactor : NormTeams {
  static constexpr int kThreads = 512, kBlocksPerSm = 1;
  static constexpr int kStepPhases = 2, kPhases = 2, team = kThreads, apart = 1;

  const NormPart* parts;
  int64_t num_parts;
  float most;
  ClipResult* result;

  int64_t num_blocks() const { return 1; }
  size_t shared_bytes() const { return 0; }
  TORCHTP_HOST_DEVICE int num_steps(int64_t) const { return 1; }

  template <int kPhase>
  TORCHTP_HOST_DEVICE void run(const Place& place, int, State& state, void*) const {
    if constexpr (kPhase == 0) {
      NormPart sum{};
      for (int64_t i = place.thread; i < num_parts; i += kThreads) sum = combine(sum, parts[i]);
      state.partial = sum;
    } else if (place.thread == 0) {
      const auto norm = static_cast<float>(std::sqrt(state.partial.squares));
      const float factor = most / (norm + 1e-6f);  // as torch.nn.utils.clip_grad_norm_
      *result = {norm, factor < 1 ? factor : (factor == factor ? 1.0f : factor),
                 state.partial.not_finite > 0 ? 1.0f : 0.0f};
    }
  }
};

// See run_on_host.h for Run.
template <typename T, typename F, bool kPack, typename Run>
void run_bucket_move(const Run& run, const std::vector<BucketTensor>& tensors, F* flat, float scale,
                     const float* device_scale) {
  for (size_t next = 0; next < tensors.size();) {
    run.program(BucketMove<T, F, kPack>{{}, flat, scale, device_scale, BucketTable::take(tensors, next)});
  }
}

template <typename T, typename F>
void bucket_pack_cpu(const std::vector<BucketTensor>& tensors, F* flat, float scale);
template <typename T, typename F>
void bucket_unpack_cpu(const std::vector<BucketTensor>& tensors, F* flat, float scale);

// Parts of the norm of that many elements.
inline int64_t bucket_norm_parts(int64_t count) { return BucketNorm<float>{{}, nullptr, count, nullptr}.num_blocks(); }
template <typename F>
void bucket_norm_cpu(const F* flat, int64_t count, NormPart* parts);
void clip_factor_cpu(const NormPart* parts, int64_t num_parts, float most, ClipResult* result);

}  // namespace torchtp::kernels
