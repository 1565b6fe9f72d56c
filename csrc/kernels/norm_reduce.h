#pragma once

#include <type_traits>

#include "kernels/block_program.h"
#include "kernels/divider.h"
#include "kernels/norm.h"
#include "kernels/vectors.h"

// The passes of norms that reduce, for the device: of every (batch, channel) either (mean, m2) of x, or the sums of dy
// and dy * (x - center). A tensor is reduced in `pieces` parts whose results the caller merges. A thread takes kHeld
// numbers into registers, so that it can go over them twice, before it merges them with what it had.
namespace torchtp::kernels {

constexpr int kReduceHeld = 16;

// Of kCount channels. Moments: count, mean, m2; dots: sum, dot.
template <int kCount, bool kDots>
struct NormPartial {
  float count;
  float first[kCount], second[kCount];

  static TORCHTP_HOST_DEVICE NormPartial combine(const NormPartial& low, const NormPartial& high) {
    NormPartial all = low;
    all.add(high);
    return all;
  }
  TORCHTP_HOST_DEVICE void add(const NormPartial& other) {
    if (other.count == 0) return;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if constexpr (kDots) {
        first[k] += other.first[k];
        second[k] += other.second[k];
      } else {
        norm_merge(count, other.count, other.first[k], other.second[k], first[k], second[k]);
      }
    }
    count += other.count;
  }
  // Of the first `valid` of kValues numbers of channel k; `share` is one over their number.
  template <int kValues>
  TORCHTP_HOST_DEVICE void set_moments(int k, const float (&values)[kValues], int valid, float share) {
    float sum = 0, squares = 0;
#pragma unroll
    for (int i = 0; i < kValues; ++i) sum += i < valid ? values[i] : 0;
    const float mean = sum * share;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const float off = i < valid ? values[i] - mean : 0;
      squares += off * off;
    }
    first[k] = mean;
    second[k] = squares;
  }
  template <int kValues>
  TORCHTP_HOST_DEVICE void set_dots(int k, const float (&grads)[kValues], const float (&values)[kValues], float center,
                                    int valid) {
    first[k] = second[k] = 0;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (i >= valid) continue;
      first[k] += grads[i];
      second[k] += grads[i] * (values[i] - center);
    }
  }
};

inline TORCHTP_HOST_DEVICE float share_of(int count) { return count > 0 ? 1.0f / static_cast<float>(count) : 0.0f; }

template <typename T>
struct NormReduceParams {
  const T* x;
  const T* dy;          // dots only
  const float* center;  // dots only: one of each (batch, group of channels), or of each group; null: 0
  double* first;        // [pieces, N, C]: mean or sum
  double* second;       // m2 or dot
  double* counts;       // [pieces]: elements of a plane in each; may be null
  T* scaled;            // dots only, may be null: dy * scale on the way
  const float* scale;   // of each (batch, channel), or of each channel
  int64_t batches;
  NormShape shape;
  int64_t pieces;
  int64_t num_centers;  // groups of channels
  Divider by_members = Divider(num_centers > 0 ? shape.channels / num_centers : 1);

  TORCHTP_HOST_DEVICE int64_t numbers() const { return batches * shape.channels; }
  TORCHTP_HOST_DEVICE float center_of(int64_t n, int64_t channel) const {
    if (!center) return 0;
    const int64_t group = by_members.quotient(static_cast<int32_t>(channel));
    return center[(shape.batch_stride > 0 ? n * num_centers : 0) + group];
  }
  TORCHTP_HOST_DEVICE int64_t begin(int64_t piece, int64_t extent) const { return extent * piece / pieces; }
};

// Channels first. `team` threads take one piece of one plane.
template <typename T, int kVector, bool kDots>
struct NormReducePlanes {
  static constexpr int kThreads = 256, kBlocksPerSm = 2;
  static constexpr int kStepPhases = 2, kPhases = 2, apart = 1;
  static constexpr int64_t kPiece = 32768;  // elements, about
  using Partial = NormPartial<1, kDots>;
  struct State {
    Partial partial;
  };

  NormReduceParams<T> params;
  int team;

  static int64_t pieces(const NormShape& shape, int64_t) { return (shape.inner + kPiece - 1) / kPiece; }
  static NormReducePlanes make(const NormReduceParams<T>& params) {
    const int64_t each = params.shape.inner / params.pieces;
    const int log = log2_up((each + 2 * kReduceHeld - 1) / (2 * kReduceHeld));
    return {params, 1 << (log > 8 ? 8 : (log < 3 ? 3 : log))};
  }

  int64_t num_blocks() const { return (params.numbers() * params.pieces * team + kThreads - 1) / kThreads; }
  size_t shared_bytes() const { return 0; }
  TORCHTP_HOST_DEVICE int num_steps(int64_t) const { return 1; }
  static constexpr bool reduces(int phase) { return phase == 0; }
  static TORCHTP_HOST_DEVICE Partial combine(const Partial& low, const Partial& high) {
    return Partial::combine(low, high);
  }

  template <int kPhase>
  TORCHTP_HOST_DEVICE void run(const Place& place, int, State& state, void*) const {
    const int64_t unit = (place.block * kThreads + place.thread) / team;
    if (unit >= params.numbers() * params.pieces) return;
    const int64_t plane = unit / params.pieces, piece = unit - plane * params.pieces;
    if constexpr (kPhase == 0) {
      state.partial = sum(plane, piece, place.thread % team);
    } else if (place.thread % team == 0) {
      params.first[piece * params.numbers() + plane] = state.partial.first[0];
      params.second[piece * params.numbers() + plane] = state.partial.second[0];
      if (plane == 0 && params.counts) params.counts[piece] = state.partial.count;
    }
  }

 private:
  TORCHTP_HOST_DEVICE Partial sum(int64_t plane, int64_t piece, int thread) const {
    constexpr int kBatch = kReduceHeld / kVector;
    const int64_t vectors = params.shape.inner / kVector, end = params.begin(piece + 1, vectors);
    const int64_t n = plane / params.shape.channels, channel = plane - n * params.shape.channels;
    const float center = kDots ? params.center_of(n, channel) : 0;
    const float scale = kDots && params.scaled ? params.scale[n * params.shape.batch_stride + channel] : 0;
    Partial all{};
    const auto take = [&](int64_t first, auto whole) {
      float values[kReduceHeld], grads[kReduceHeld];
      int valid = whole ? kReduceHeld : 0;
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int64_t v = first + int64_t{b} * team;
        if (!whole && v >= end) continue;
        const int64_t at = (plane * vectors + v) * kVector;
        const Vector<kVector> in = widened(load_pack(reinterpret_cast<const Pack<T, kVector>*>(params.x + at)));
#pragma unroll
        for (int k = 0; k < kVector; ++k) values[b * kVector + k] = in.values[k];
        if constexpr (kDots) {
          const Vector<kVector> grad = widened(load_pack(reinterpret_cast<const Pack<T, kVector>*>(params.dy + at)));
#pragma unroll
          for (int k = 0; k < kVector; ++k) grads[b * kVector + k] = grad.values[k];
          if (params.scaled) {
            Pack<T, kVector> scaled;
#pragma unroll
            for (int k = 0; k < kVector; ++k) scaled.values[k] = static_cast<T>(grad.values[k] * scale);
            store_pack(reinterpret_cast<Pack<T, kVector>*>(params.scaled + at), scaled);
          }
        }
        if (!whole) valid += kVector;
      }
      Partial here;
      here.count = static_cast<float>(valid);
      if constexpr (kDots) {
        here.set_dots(0, grads, values, center, valid);
      } else {
        here.set_moments(0, values, valid, share_of(valid));
      }
      all.add(here);
    };
    for (int64_t first = params.begin(piece, vectors) + thread; first < end; first += int64_t{kBatch} * team) {
      first + int64_t{kBatch - 1} * team < end ? take(first, std::true_type()) : take(first, std::false_type());
    }
    return all;
  }
};

// Channels last. A block takes one piece of the rows of one batch, for up to 32 * kVector channels.
template <typename T, int kVector, bool kDots>
struct NormReduceRows {
  static constexpr int kThreads = 256, kBlocksPerSm = kDots ? 3 : 4;
  static constexpr int kStepPhases = 2, kPhases = 2, team = kThreads;
  static constexpr int64_t kPiece = 65536;
  using Partial = NormPartial<kVector, kDots>;
  struct State {
    Partial partial;
  };

  NormReduceParams<T> params;
  int apart;  // threads beside each other

  static int lanes(int64_t channels) {
    const int log = log2_up((channels + kVector - 1) / kVector);
    return 1 << (log > 5 ? 5 : log);
  }
  static int64_t pieces(const NormShape& shape, int64_t) {
    const int64_t rows = kPiece / (lanes(shape.channels) * kVector);
    return (shape.inner + rows - 1) / rows;
  }
  static NormReduceRows make(const NormReduceParams<T>& params) { return {params, lanes(params.shape.channels)}; }

  TORCHTP_HOST_DEVICE int64_t chunks() const {
    return (params.shape.channels + apart * kVector - 1) / (apart * kVector);
  }
  int64_t num_blocks() const { return params.batches * params.pieces * chunks(); }
  size_t shared_bytes() const { return 0; }
  TORCHTP_HOST_DEVICE int num_steps(int64_t) const { return 1; }
  static constexpr bool reduces(int phase) { return phase == 0; }
  static TORCHTP_HOST_DEVICE Partial combine(const Partial& low, const Partial& high) {
    return Partial::combine(low, high);
  }

  template <int kPhase>
  TORCHTP_HOST_DEVICE void run(const Place& place, int, State& state, void*) const {
    const int64_t rest = place.block / chunks(), chunk = place.block - rest * chunks();
    const int64_t n = rest / params.pieces, piece = rest - n * params.pieces;
    const int64_t c = (chunk * apart + place.thread % apart) * kVector;
    if (c >= params.shape.channels) return;
    if constexpr (kPhase == 0) {
      state.partial = sum(n, piece, c, place.thread / apart);
    } else if (place.thread < apart) {
      const int64_t at = (piece * params.batches + n) * params.shape.channels + c;
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        params.first[at + k] = state.partial.first[k];
        params.second[at + k] = state.partial.second[k];
      }
      if (n == 0 && c == 0 && params.counts) params.counts[piece] = state.partial.count;
    }
  }

 private:
  TORCHTP_HOST_DEVICE Partial sum(int64_t n, int64_t piece, int64_t c, int group) const {
    constexpr int kBatch = kVector > 1 ? kReduceHeld / kVector : 8;
    const int groups = kThreads / apart;
    const int64_t end = params.begin(piece + 1, params.shape.inner);
    float center[kVector], scale[kVector];
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      center[k] = kDots ? params.center_of(n, c + k) : 0;
      scale[k] = kDots && params.scaled ? params.scale[n * params.shape.batch_stride + c + k] : 0;
    }
    Partial all{};
    const auto take = [&](int64_t first, auto whole) {
      float values[kVector][kBatch], grads[kVector][kBatch];
      int valid = whole ? kBatch : 0;
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int64_t row = first + b * groups;
        if (!whole && row >= end) continue;
        const int64_t at = (n * params.shape.inner + row) * params.shape.channels + c;
        const Vector<kVector> in = widened(load_pack(reinterpret_cast<const Pack<T, kVector>*>(params.x + at)));
#pragma unroll
        for (int k = 0; k < kVector; ++k) values[k][b] = in.values[k];
        if constexpr (kDots) {
          const Vector<kVector> grad = widened(load_pack(reinterpret_cast<const Pack<T, kVector>*>(params.dy + at)));
#pragma unroll
          for (int k = 0; k < kVector; ++k) grads[k][b] = grad.values[k];
          if (params.scaled) {
            Pack<T, kVector> scaled;
#pragma unroll
            for (int k = 0; k < kVector; ++k) scaled.values[k] = static_cast<T>(grad.values[k] * scale[k]);
            store_pack(reinterpret_cast<Pack<T, kVector>*>(params.scaled + at), scaled);
          }
        }
        if (!whole) ++valid;
      }
      Partial here;
      here.count = static_cast<float>(valid);
      const float share = share_of(valid);
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        if constexpr (kDots) {
          here.set_dots(k, grads[k], values[k], center[k], valid);
        } else {
          here.set_moments(k, values[k], valid, share);
        }
      }
      all.add(here);
    };
    for (int64_t first = params.begin(piece, params.shape.inner) + group; first < end; first += kBatch * groups) {
      first + (kBatch - 1) * groups < end ? take(first, std::true_type()) : take(first, std::false_type());
    }
    return all;
  }
};

}  // namespace torchtp::kernels
