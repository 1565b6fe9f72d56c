// What lies between a norm's passes: parts merged to statistics, sums to gradients and factors, on one rank and on
// some.
#include "kernels/norm_finish.h"

#include <limits>

#include "check.h"
#include "close.h"
#include "kernels/run_on_host.h"

using namespace torchtp;
using kernels::NormGroups;
using kernels::NormParts;

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kEps = 1e-3, kMomentum = 0.3;
constexpr float kFloatNan = std::numeric_limits<float>::quiet_NaN();

std::string name_of(const NormGroups& g, int64_t pieces) {
  return std::to_string(g.batches) + " x " + std::to_string(g.channels) + " in " + std::to_string(g.num_groups) +
         " groups, " + std::to_string(pieces) + " pieces";
}
int64_t statistic_of(const NormGroups& g, int64_t number) {
  const int64_t n = number / g.channels, c = number % g.channels;
  return g.num_groups > 0 ? n * g.num_groups + c / (g.channels / g.num_groups) : c;
}
int64_t num_factors(const NormGroups& g) { return g.num_groups > 0 ? g.batches * g.channels : g.channels; }
int64_t channel_of(const NormGroups& g, int64_t factor) { return factor % g.channels; }
int64_t statistic_of_factor(const NormGroups& g, int64_t factor) {
  return g.num_groups > 0 ? statistic_of(g, factor) : factor;
}

kernels::AnyRow<const void> read(const std::vector<double>& row) { return {row.data(), kernels::NumberType::kDouble}; }
kernels::AnyRow<const void> read(const std::vector<c10::BFloat16>& row) {
  return {row.data(), kernels::NumberType::kBFloat16};
}
kernels::AnyRow<void> write(std::vector<float>& row) { return {row.data(), kernels::NumberType::kFloat}; }
kernels::AnyRow<void> write(std::vector<c10::Half>& row) { return {row.data(), kernels::NumberType::kHalf}; }

// A rank's parts, of other sizes on each.
struct Parts {
  std::vector<double> first, second, counts;

  Parts(const NormGroups& g, int64_t pieces, unsigned seed)
      : first(test::noise(pieces * g.batches * g.channels, seed, 3)),
        second(test::noise(pieces * g.batches * g.channels, seed + 1, 1)) {
    for (int64_t piece = 0; piece < pieces; ++piece) counts.push_back(static_cast<double>((seed + piece) % 4 + 1));
  }
  NormParts on(const NormGroups& g) const {
    return NormParts::of_reduction(g, first.data(), second.data(), counts.data(), static_cast<int64_t>(counts.size()));
  }
};

void check_forward(const NormGroups& g, int64_t pieces, int64_t ranks) {
  const int64_t numbers = g.batches * g.channels, statistics = g.statistics();
  const std::string name = name_of(g, pieces) + ", " + std::to_string(ranks) + " ranks";
  std::vector<Parts> parts;
  std::vector<double> count(statistics), mean(statistics), m2(statistics);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    parts.emplace_back(g, rank == 1 ? 0 : pieces, static_cast<unsigned>(10 * rank + 1));  // the second one has none
    const Parts& p = parts.back();
    for (size_t i = 0; i < p.first.size(); ++i) {
      const int64_t s = statistic_of(g, static_cast<int64_t>(i) % numbers);
      const double n = p.counts[static_cast<int64_t>(i) / numbers], all = count[s] + n, off = p.first[i] - mean[s];
      mean[s] += off * n / all;
      m2[s] += p.second[i] + off * off * count[s] * n / all;
      count[s] = all;
    }
  }
  const auto weight = test::noise(g.channels, 5), old_mean = test::noise(g.channels, 6),
             old_var = test::noise(g.channels, 7, 2);
  auto bias = test::noise(g.channels, 8);
  const auto short_bias = test::rounded<c10::BFloat16>(bias);
  std::vector<float> running_mean(old_mean.begin(), old_mean.end());
  std::vector<c10::Half> running_var;
  for (double value : old_var) running_var.push_back(static_cast<c10::Half>(static_cast<float>(value)));
  const bool runs = g.num_groups == 0;

  std::vector<float> found_mean(statistics, kFloatNan), invstd(found_mean), center(num_factors(g), kFloatNan),
      scale(center), shift(center);
  kernels::NormFinish finish;
  finish.groups = g;
  finish.eps = kEps;
  finish.momentum = kMomentum;
  std::vector<double> messages(ranks * (1 + 2 * statistics), kNan);
  finish.parts = parts[0].on(g);
  if (ranks > 1) {
    for (int64_t rank = 0; rank < ranks; ++rank) {
      finish.parts = parts[rank].on(g);
      finish.message = messages.data() + rank * (1 + 2 * statistics);
      kernels::run_norm_finish(kernels::RunOnHost(), finish);
    }
    finish.message = nullptr;
    finish.parts = NormParts::of_messages(messages.data(), ranks, statistics);
  }
  finish.weight = read(weight);
  finish.bias = read(short_bias);
  if (runs) {
    finish.running_mean = write(running_mean);
    finish.running_var = write(running_var);
  }
  finish.mean = found_mean.data();
  finish.invstd = invstd.data();
  finish.center = center.data();
  finish.scale = scale.data();
  finish.shift = shift.data();
  kernels::run_norm_finish(kernels::RunOnHost(), finish);

  std::vector<double> want_invstd(statistics), want_center, want_scale, want_shift, now_mean(g.channels),
      now_var(g.channels);
  for (int64_t s = 0; s < statistics; ++s) want_invstd[s] = 1 / std::sqrt(m2[s] / count[s] + kEps);
  for (int64_t f = 0; f < num_factors(g); ++f) {
    const int64_t s = statistic_of_factor(g, f), c = channel_of(g, f);
    want_center.push_back(mean[s]);
    want_scale.push_back(want_invstd[s] * weight[c]);
    want_shift.push_back(bias[c]);
  }
  test::check_close(found_mean, mean, 1e-6, name + ", mean");
  test::check_close(invstd, want_invstd, 1e-6, name + ", invstd");
  test::check_close(center, want_center, 1e-6, name + ", center");
  test::check_close(scale, want_scale, 1e-6, name + ", scale");
  test::check_close(shift, want_shift, 0, name + ", shift");
  if (!runs) return;
  for (int64_t c = 0; c < g.channels; ++c) {
    now_mean[c] = old_mean[c] * (1 - kMomentum) + mean[c] * kMomentum;
    now_var[c] = old_var[c] * (1 - kMomentum) + m2[c] / (count[c] - 1) * kMomentum;
  }
  test::check_close(running_mean, now_mean, 1e-6, name + ", running mean");
  test::check_close(running_var, now_var, 1e-3, name + ", running variance");
}

void check_backward(const NormGroups& g, int64_t pieces, int64_t ranks) {
  const int64_t numbers = g.batches * g.channels, statistics = g.statistics();
  const bool grouped = g.num_groups > 0;
  const std::string name = name_of(g, pieces) + ", " + std::to_string(ranks) + " ranks, backward";
  auto mean = test::noise(statistics, 3), invstd = test::noise(statistics, 4, 2);
  const auto f_mean = test::rounded<float>(mean), f_invstd = test::rounded<float>(invstd);
  const auto weight = test::noise(g.channels, 5);
  std::vector<double> sum(statistics), dot(statistics), total(2 * statistics + 1);
  std::vector<double> messages(ranks * (2 * statistics + 1), kNan);
  kernels::NormGradFinish finish;
  finish.groups = g;
  finish.weight = read(weight);
  finish.mean = f_mean.data();
  finish.invstd = f_invstd.data();
  std::vector<float> center(num_factors(g), kFloatNan), on_dy(center), on_x(center), shift(center);
  const auto ask_for_factors = [&] {
    finish.center = center.data();
    finish.on_dy = on_dy.data();
    finish.on_x = on_x.data();
    finish.shift = shift.data();
  };
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const Parts parts(g, pieces, static_cast<unsigned>(10 * rank + 1));
    std::vector<double> want_weight(g.channels), want_bias(g.channels);
    for (size_t i = 0; i < parts.first.size(); ++i) {
      const int64_t number = static_cast<int64_t>(i) % numbers, s = statistic_of(g, number), c = number % g.channels;
      sum[s] += parts.first[i] * (grouped ? weight[c] : 1);
      dot[s] += parts.second[i] * (grouped ? weight[c] : 1);
      want_weight[c] += parts.second[i] * invstd[s];
      want_bias[c] += parts.first[i];
    }
    std::vector<float> grad_weight(g.channels, kFloatNan), grad_bias(grad_weight);
    finish.parts = parts.on(g);
    finish.weighed = grouped;
    finish.number = 10.0 + static_cast<double>(rank);
    finish.grad_weight = write(grad_weight);
    finish.grad_bias = write(grad_bias);
    if (ranks > 1) {
      finish.message = messages.data() + rank * (2 * statistics + 1);
    } else {
      ask_for_factors();
    }
    kernels::run_norm_finish(kernels::RunOnHost(), finish);
    test::check_close(grad_weight, want_weight, 1e-6, name + ", weight");
    test::check_close(grad_bias, want_bias, 1e-6, name + ", bias");
  }
  double count = 10;
  if (ranks > 1) {
    for (size_t i = 0; i < messages.size(); ++i) total[i % total.size()] += messages[i];
    count = total.back();
    CHECK_EQUAL(count, 10.0 * static_cast<double>(ranks) + static_cast<double>(ranks * (ranks - 1) / 2));
    finish.parts = NormParts::of_sums(total.data(), statistics);
    finish.total = total.data() + 2 * statistics;
    finish.message = nullptr;
    finish.weighed = false;
    finish.grad_weight = finish.grad_bias = {};
    ask_for_factors();
    kernels::run_norm_finish(kernels::RunOnHost(), finish);
  }
  std::vector<double> want_center, want_on_dy, want_on_x, want_shift;
  for (int64_t f = 0; f < num_factors(g); ++f) {
    const int64_t s = statistic_of_factor(g, f);
    const double w = weight[channel_of(g, f)], r = invstd[s];
    want_center.push_back(mean[s]);
    want_on_dy.push_back(r * w);
    want_on_x.push_back(-(r * (grouped ? 1 : w) * r * r * dot[s] / count));
    want_shift.push_back(-(r * (grouped ? 1 : w) * sum[s] / count));
  }
  test::check_close(center, want_center, 0, name + ", center");
  test::check_close(on_dy, want_on_dy, 1e-6, name + ", on dy");
  test::check_close(on_x, want_on_x, 1e-6, name + ", on x");
  test::check_close(shift, want_shift, 1e-6, name + ", shift");
}

void any_groups_and_pieces_on_any_ranks() {
  const NormGroups some[] = {{1, 1, 0}, {3, 5, 0},  {7, 70, 0},  {64, 8, 0}, {1, 300, 0},
                             {2, 6, 2}, {3, 64, 1}, {5, 40, 40}, {4, 12, 3}, {1, 600, 2}};
  for (const NormGroups& groups : some)
    for (int64_t pieces : {1, 3, 64})
      for (int64_t ranks : {1, 3}) {
        check_forward(groups, pieces, ranks);
        check_backward(groups, pieces, ranks);
      }
}

// Evaluation: the running statistics are used and stay, and no gradient goes through them.
void running_statistics() {
  const NormGroups g{2, 37, 0};
  auto old_mean = test::noise(37, 1), old_var = test::noise(37, 2, 2);
  auto mean = test::rounded<float>(old_mean), var = test::rounded<float>(old_var);
  std::vector<float> center(37, kFloatNan), scale(center), shift(center), on_x(center);
  std::vector<double> want_scale;
  for (double value : old_var) want_scale.push_back(1 / std::sqrt(value + kEps));
  kernels::NormFinish finish;
  finish.groups = g;
  finish.constant = true;
  finish.eps = kEps;
  finish.running_mean = write(mean);
  finish.running_var = write(var);
  finish.center = center.data();
  finish.scale = scale.data();
  finish.shift = shift.data();
  kernels::run_norm_finish(kernels::RunOnHost(), finish);
  test::check_close(center, old_mean, 0, "center of running statistics");
  test::check_close(scale, want_scale, 1e-6, "scale of running statistics");
  test::check_close(shift, std::vector<double>(37), 0, "shift of running statistics");
  test::check_close(var, old_var, 0, "running variance");

  const Parts parts(g, 3, 4);
  std::vector<float> grad_weight(37, kFloatNan), grad_bias(grad_weight);
  std::vector<double> want_weight(37), want_bias(37);
  for (size_t i = 0; i < parts.first.size(); ++i) {
    want_weight[i % 37] += parts.second[i] * want_scale[i % 37];
    want_bias[i % 37] += parts.first[i];
  }
  kernels::NormGradFinish backward;
  backward.groups = g;
  backward.parts = parts.on(g);
  backward.constant = true;
  backward.eps = kEps;
  backward.running_var = {var.data(), kernels::NumberType::kFloat};
  backward.grad_weight = write(grad_weight);
  backward.grad_bias = write(grad_bias);
  backward.center = center.data();
  backward.on_dy = scale.data();
  backward.on_x = on_x.data();
  backward.shift = shift.data();
  kernels::run_norm_finish(kernels::RunOnHost(), backward);
  test::check_close(grad_weight, want_weight, 1e-6, "weight of running statistics");
  test::check_close(grad_bias, want_bias, 1e-6, "bias of running statistics");
  test::check_close(center, std::vector<double>(37), 0, "center of dx");
  test::check_close(scale, want_scale, 1e-6, "factor of dx");
  test::check_close(shift, std::vector<double>(37), 0, "shift of dx");
}

}  // namespace

int main() {
  return test::run({{"any groups and pieces on any ranks", any_groups_and_pieces_on_any_ranks},
                    {"running statistics", running_statistics}});
}
