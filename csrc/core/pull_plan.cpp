#include "core/pull_plan.h"

namespace torchtp {

PullPlan make_pull_plan(int64_t extent, int rank, const std::vector<Interval>& wanted) {
  const int num_ranks = static_cast<int>(wanted.size());
  const Interval all{0, extent};
  PullPlan plan;
  plan.own = owned(extent, num_ranks, rank);
  plan.wanted = intersect(wanted[rank], all);
  plan.kept = intersect(plan.wanted, plan.own);
  for (int peer = 0; peer < num_ranks; ++peer) {
    const Interval theirs = owned(extent, num_ranks, peer);
    if (!theirs.contains(intersect(wanted[peer], all))) plan.anyone_moves = true;
    if (peer == rank) continue;
    const Interval out = intersect(plan.own, intersect(wanted[peer], all));
    if (!out.empty()) plan.sends.push_back({peer, out});
    const Interval in = intersect(theirs, plan.wanted);
    if (!in.empty()) plan.receives.push_back({peer, in});
  }
  return plan;
}

std::shared_ptr<const PullPlan> PullPlans::get(int64_t extent, int rank, const std::vector<Interval>& wanted) {
  std::vector<int64_t> key{extent, rank};
  for (const Interval& interval : wanted) key.insert(key.end(), {interval.begin, interval.end});
  std::lock_guard<std::mutex> lock(mutex_);
  // Rows that are never wanted again, as of crops at random, must not pile up.
  if (plans_.size() >= kMostPlans && plans_.count(key) == 0) plans_.clear();
  std::shared_ptr<const PullPlan>& plan = plans_[std::move(key)];
  if (!plan) plan = std::make_shared<const PullPlan>(make_pull_plan(extent, rank, wanted));
  return plan;
}

}  // namespace torchtp
