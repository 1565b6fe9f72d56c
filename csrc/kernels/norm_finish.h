#pragma once

#include <algorithm>
#include <cmath>

#include "kernels/any_row.h"
#include "kernels/column_teams.h"
#include "kernels/divider.h"
#include "kernels/narrow.h"

// What lies between the passes of a norm over its tensor, for the device: a launch each for all that is done with a few
// numbers. In double, whatever the tensor's type, and in an order that depends on nothing but the extents.
namespace torchtp::kernels {

// Which numbers of [N, C] make a statistic.
struct NormGroups {
  int64_t batches, channels;
  int64_t num_groups;  // of the channels of each batch; 0: a channel of all batches is one

  TORCHTP_HOST_DEVICE int64_t statistics() const { return num_groups > 0 ? batches * num_groups : channels; }
  TORCHTP_HOST_DEVICE int64_t members() const { return num_groups > 0 ? channels / num_groups : batches; }
  // Factors that go by one statistic: those of [N, C], or of [C].
  TORCHTP_HOST_DEVICE int64_t factors() const { return num_groups > 0 ? channels / num_groups : 1; }
};

// Where the parts of each statistic lie: a pair of numbers for each member of each piece.
struct NormParts {
  const double* first = nullptr;   // mean or sum
  const double* second = nullptr;  // m2 or dot
  const double* counts = nullptr;  // of moments: elements of a part, the same for all of a piece
  int64_t pieces = 0, members = 1;
  int64_t piece_stride = 0, member_stride = 0, statistic_stride = 1, count_stride = 1;
  Divider by_members;

  // What norm_reduce.h leaves, [pieces, N, C] and [pieces].
  static NormParts of_reduction(const NormGroups& groups, const double* first, const double* second,
                                const double* counts, int64_t pieces) {
    const bool grouped = groups.num_groups > 0;
    return {first,
            second,
            counts,
            pieces,
            groups.members(),
            groups.batches * groups.channels,
            grouped ? 1 : groups.channels,
            grouped ? groups.members() : 1,
            1,
            Divider(groups.members())};
  }
  // NormFinish's messages, of `ranks` ranks.
  static NormParts of_messages(const double* messages, int64_t ranks, int64_t statistics) {
    const int64_t each = 1 + 2 * statistics;
    return {messages + 1, messages + 1 + statistics, messages, ranks, 1, each, 0, 1, each, Divider(1)};
  }
  // The sum of NormGradFinish's messages.
  static NormParts of_sums(const double* message, int64_t statistics) {
    return {message, message + statistics, nullptr, 1, 1, 0, 0, 1, 0, Divider(1)};
  }

  // Extents of parts and of statistics fit 32 bits: each of them is some elements of a tensor.
  TORCHTP_HOST_DEVICE int32_t size() const { return static_cast<int32_t>(pieces * members); }
  TORCHTP_HOST_DEVICE int64_t at(int64_t statistic, int32_t piece, int32_t member) const {
    return piece * piece_stride + member * member_stride + statistic * statistic_stride;
  }
};

// Some threads for each statistic.
struct NormTeams : ColumnTeams {
  static constexpr int kBlocksPerSm = 2;

  // For statistics of up to `parts` parts.
  void set_teams(int64_t parts) { static_cast<ColumnTeams&>(*this) = ColumnTeams(parts, 2, 6); }
  static constexpr Meeting meets(int) { return Meeting::kNobody; }
  size_t shared_bytes() const { return 0; }
  TORCHTP_HOST_DEVICE int num_steps(int64_t) const { return 1; }
};

struct NormPair {
  double first, second;
};

// From moments of parts to a message for other ranks, or to the statistics and all that follows from them.
struct NormFinish : NormTeams {
  static constexpr int kStepPhases = 3, kPhases = 3;
  static constexpr bool kCommutes = true;
  struct State {
    NormPair partial;
    double count, mean;
  };

  NormGroups groups;
  NormParts parts;
  bool constant = false;  // the statistics are the running ones
  double eps = 0, momentum = 0;
  double* message = nullptr;  // if not null nothing else is written: count, means, m2
  AnyRow<const void> weight, bias;
  AnyRow<void> running_mean, running_var;
  float* mean = nullptr;  // one of each statistic
  float* invstd = nullptr;
  float* center = nullptr;  // factors of norm_apply
  float* scale = nullptr;
  float* shift = nullptr;
  Divider by_groups;

  void prepare() {
    set_teams(std::max(parts.pieces * parts.members, groups.factors()));
    by_groups = Divider(groups.num_groups);
  }
  int64_t num_blocks() const { return blocks(groups.statistics()); }
  static constexpr bool reduces(int phase) { return phase < 2; }
  static TORCHTP_HOST_DEVICE NormPair combine(const NormPair& low, const NormPair& high) {
    return {low.first + high.first, low.second + high.second};
  }

  template <int kPhase>
  TORCHTP_HOST_DEVICE void run(const Place& place, int, State& state, void*) const {
    const int64_t s = column(place);
    if (s >= groups.statistics()) return;
    if constexpr (kPhase == 0) {
      NormPair sum{};
#pragma unroll 4
      for (int32_t part = rank(place); part < parts.size(); part += ranks()) {
        const int32_t piece = parts.by_members.quotient(part), member = part - piece * parts.by_members.divisor;
        const double count = parts.counts[piece * parts.count_stride];
        sum.first += count;
        sum.second += count * parts.first[parts.at(s, piece, member)];
      }
      state.partial = sum;
    } else if constexpr (kPhase == 1) {
      state.count = state.partial.first;
      state.mean = state.partial.second / (state.count < 1 ? 1 : state.count);
      NormPair sum{};
#pragma unroll 4
      for (int32_t part = rank(place); part < parts.size(); part += ranks()) {
        const int32_t piece = parts.by_members.quotient(part), member = part - piece * parts.by_members.divisor;
        const int64_t at = parts.at(s, piece, member);
        const double off = parts.first[at] - state.mean;
        sum.first += parts.second[at];
        sum.second += off * off * parts.counts[piece * parts.count_stride];
      }
      state.partial = sum;
    } else {
      finish(s, rank(place), state.count, state.mean, state.partial.first + state.partial.second);
    }
  }

 private:
  TORCHTP_HOST_DEVICE void finish(int64_t s, int rank, double count, double middle, double m2) const {
    if (message) {
      if (rank != 0) return;
      message[1 + s] = middle;
      message[1 + groups.statistics() + s] = m2;
      if (s == 0) message[0] = count;
      return;
    }
    double variance = m2 / (count < 1 ? 1 : count);
    if (constant) {
      middle = running_mean.load(s);
      variance = running_var.load(s);
    }
    const double share = 1 / sqrt(variance + eps);
    if (rank == 0 && !constant) {
      mean[s] = static_cast<float>(middle);
      invstd[s] = static_cast<float>(share);
      // A batch of nothing leaves them as they are.
      if (running_mean && count > 0) update(running_mean, s, middle);
      if (running_var && count > 0) update(running_var, s, m2 / (count - 1));
    }
    const auto own = static_cast<int32_t>(s);
    const int64_t first = groups.num_groups > 0 ? by_groups.rest(own) * groups.factors() : s;
    for (int64_t m = rank; m < groups.factors(); m += ranks()) {
      const int64_t to = s * groups.factors() + m;
      center[to] = static_cast<float>(middle);
      scale[to] = static_cast<float>(share * weight.load_or(first + m, 1));
      shift[to] = static_cast<float>(bias.load_or(first + m, 0));
    }
  }
  TORCHTP_HOST_DEVICE void update(const AnyRow<void>& running, int64_t s, double now) const {
    running.store(s, running.load(s) * (1 - momentum) + now * momentum);
  }
};

// From sums of dy and of dy * (x - center) to a message for other ranks, or to the factors of dx; and to the gradients
// of weight and bias, which stay on this rank. Where those are sums of other numbers than the statistics' they have
// blocks of their own, behind the statistics'.
struct NormGradFinish : NormTeams {
  static constexpr int kStepPhases = 2, kPhases = 2;
  static constexpr bool kCommutes = true;
  struct State {
    NormPair partial;
  };

  NormGroups groups;
  NormParts parts;
  bool weighed = false;   // the parts are not times the weight yet, which grouped statistics need
  bool constant = false;  // the statistics are the running ones, and no gradient goes through them
  double eps = 0;
  double number = 0;              // elements of a statistic, here
  const double* total = nullptr;  // on all ranks; null: those here
  double* message = nullptr;      // if not null no factors are written: sums, dots, number
  AnyRow<const void> weight, running_var;
  const float* mean = nullptr;    // one of each statistic
  const float* invstd = nullptr;  // null: 1
  AnyRow<void> grad_weight, grad_bias;
  float* center = nullptr;  // factors of norm_grad; null: none are asked for
  float* on_dy = nullptr;
  float* on_x = nullptr;
  float* shift = nullptr;
  Divider by_groups, by_factors, by_batches;

  void prepare() {
    set_teams(
        std::max({parts.pieces * parts.members, groups.factors(), own_blocks() ? parts.pieces * groups.batches : 0}));
    by_groups = Divider(groups.num_groups);
    by_factors = Divider(groups.factors());
    by_batches = Divider(groups.batches);
  }
  TORCHTP_HOST_DEVICE bool own_blocks() const { return groups.num_groups > 0 && (grad_weight || grad_bias); }
  TORCHTP_HOST_DEVICE int64_t statistic_blocks() const {
    return message || center || !own_blocks() ? blocks(groups.statistics()) : 0;
  }
  int64_t num_blocks() const { return statistic_blocks() + (own_blocks() ? blocks(groups.channels) : 0); }
  static constexpr bool reduces(int phase) { return phase == 0; }
  static TORCHTP_HOST_DEVICE NormPair combine(const NormPair& low, const NormPair& high) {
    return {low.first + high.first, low.second + high.second};
  }

  template <int kPhase>
  TORCHTP_HOST_DEVICE void run(const Place& place, int, State& state, void*) const {
    const int64_t of_statistics = statistic_blocks();
    if (place.block >= of_statistics) {
      const int64_t c = column({place.block - of_statistics, place.thread});
      if (c >= groups.channels) return;
      if constexpr (kPhase == 0) {
        state.partial = sum_of_channel(c, rank(place));
      } else if (rank(place) == 0) {
        write_gradients(c, state.partial);
      }
      return;
    }
    const int64_t s = column(place);
    if (s >= groups.statistics()) return;
    if constexpr (kPhase == 0) {
      state.partial = sum_of_statistic(s, rank(place));
    } else {
      finish(s, rank(place), state.partial);
    }
  }

 private:
  // Of the channels that go by statistic s the first one.
  TORCHTP_HOST_DEVICE int64_t first_channel(int64_t s) const {
    return groups.num_groups > 0 ? by_groups.rest(static_cast<int32_t>(s)) * groups.factors() : s;
  }
  TORCHTP_HOST_DEVICE double share(int64_t s) const {
    if (constant) return 1 / sqrt(running_var.load(s) + eps);
    return invstd ? static_cast<double>(invstd[s]) : 1;
  }

  TORCHTP_HOST_DEVICE NormPair sum_of_statistic(int64_t s, int rank) const {
    const int64_t channel = first_channel(s);
    NormPair sum{};
#pragma unroll 4
    for (int32_t part = rank; part < parts.size(); part += ranks()) {
      const int32_t piece = parts.by_members.quotient(part), member = part - piece * parts.by_members.divisor;
      const int64_t at = parts.at(s, piece, member);
      const double factor = weighed ? weight.load_or(channel + member, 1) : 1;
      sum.first += factor * parts.first[at];
      sum.second += factor * parts.second[at];
    }
    return sum;
  }
  // Of the parts of a channel of all batches, where batches have statistics of their own.
  TORCHTP_HOST_DEVICE NormPair sum_of_channel(int64_t c, int rank) const {
    const int64_t group = by_factors.quotient(static_cast<int32_t>(c));
    const auto size = static_cast<int32_t>(parts.pieces * groups.batches);
    NormPair sum{};
#pragma unroll 4
    for (int32_t part = rank; part < size; part += ranks()) {
      const int32_t piece = by_batches.quotient(part), n = part - piece * by_batches.divisor;
      const int64_t at = piece * parts.piece_stride + n * groups.channels + c;
      sum.first += parts.first[at];
      sum.second += parts.second[at] * share(n * groups.num_groups + group);
    }
    return sum;
  }
  TORCHTP_HOST_DEVICE void write_gradients(int64_t c, const NormPair& sum) const {
    if (grad_bias) grad_bias.store(c, sum.first);
    if (grad_weight) grad_weight.store(c, sum.second);
  }

  TORCHTP_HOST_DEVICE void finish(int64_t s, int rank, const NormPair& sum) const {
    const double own = share(s);
    if (rank == 0 && groups.num_groups == 0) write_gradients(s, {sum.first, sum.second * own});
    if (message) {
      if (rank != 0) return;
      message[s] = sum.first;
      message[groups.statistics() + s] = sum.second;
      if (s == 0) message[2 * groups.statistics()] = number;
      return;
    }
    if (!center) return;
    const double count = total ? *total : number;
    const double mean_dy = constant ? 0 : sum.first / count, mean_dot = constant ? 0 : sum.second / count;
    const int64_t channel = first_channel(s);
    for (int64_t m = rank; m < groups.factors(); m += ranks()) {
      const int64_t to = s * groups.factors() + m;
      const double scale = own * weight.load_or(channel + m, 1);
      const double a = groups.num_groups > 0 ? own : scale;  // the sums of a group hold the weights already
      center[to] = constant ? 0 : mean[s];
      on_dy[to] = static_cast<float>(scale);
      on_x[to] = static_cast<float>(-(a * own * own * mean_dot));
      shift[to] = static_cast<float>(-(a * mean_dy));
    }
  }
};

// See run_on_host.h for Run.
template <typename Run, typename Finish>
void run_norm_finish(const Run& run, Finish finish) {
  finish.prepare();
  run.program(finish);
}

}  // namespace torchtp::kernels
