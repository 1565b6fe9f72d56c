#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "gradients/bucket.h"
#include "gradients/collective.h"
#include "gradients/held_hooks.h"
#include "gradients/hooks.h"
#include "gradients/options.h"
#include "gradients/statistics.h"

namespace torchtp::gradients {

// Makes every gradient its mean over the ranks before backward() returns. See NOTE [passes].
//
// NOTE [passes]
// A pass is one backward that reaches a parameter. Every pass of every rank reduces every bucket, in order of number,
// so that the ranks need not agree on what happened; what a rank's .grad holds takes part, touched or not: the mean of
// something already reduced is itself, so accumulation, before or after a reduction, needs no bookkeeping.
//  - The first pass only notes the order in which gradients come. At its end rank 0's order is broadcast, buckets are
//    planned and reduced.
//  - In later passes a bucket starts as soon as it and those before it are complete; the others at the end.
//  - A backward that throws starts its remaining buckets with the mark "failed", so that no rank waits for ever; ranks
//    whose own backward did not throw raise then. It is waited for before anything is added to a gradient again.
//    One that would have accumulated, by the interval, is a failed pass instead: the interval begins anew.
//  - Hooks of users on parameters are held back and run at the end, in the order in which gradients came, on what all
//    ranks hold then: an optimizer that steps in backward, a clamp. Hooks of what is added (Tensor.register_hook) only
//    where outputs are watched, else the pass begins after those of the first parameter; after local backwards, or
//    where derivatives of the gradient are taken, what is added alone is not known.
//  - Where they raise on some ranks alone, these may not step while others do: the next pass tells it, and all raise.
class Reducer : public Listener, public std::enable_shared_from_this<Reducer> {
 public:
  // Throws TypeError or ValueError for what no reducer can be made of. Local: who calls it tells the other ranks.
  static void check(const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names,
                    const Options& options);
  // Collective. Parameters are checked, each once.
  static std::shared_ptr<Reducer> create(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                                         const c10::intrusive_ptr<c10d::ProcessGroup>& group, const Options& options,
                                         OwnHook own_hook);
  // Deaf: create() gives one that listens.
  Reducer(std::vector<at::Tensor> parameters, std::vector<std::string> names,
          const c10::intrusive_ptr<c10d::ProcessGroup>& group, const Options& options, OwnHook own_hook);

  // While off, gradients stay this rank's own and accumulate.
  void set_sync(bool on);
  bool sync() const;
  // Only every n-th backward is a pass; those between accumulate.
  void set_interval(int64_t num_backwards);
  int64_t num_unreduced() const;  // backwards since the last pass, while only every n-th is one
  int64_t num_passes() const;     // that have ended, well or not, reduce() among them
  // Outside backward: scales gradients so that their norm is at most `most`, and gives the norm they had (a float on
  // the device). Nothing, and nothing done, where gradients do not all lie in buckets that pack, on one device.
  std::optional<at::Tensor> clip_norm(double most);
  // Outside backward, collective: a pass over what gradients hold now. Starts counting the interval anew.
  void reduce();
  // Before forward: waits for what a failed backward left under way, and listens to parameters that were cast or
  // thawed. Buckets follow them in the next pass, when ranks have agreed that all changed alike.
  void prepare();
  // A backward through `output` is a pass even if it reaches no parameter on this rank.
  void watch(const at::Tensor& output);

  void record(bool on);
  void reset_statistics();
  Statistics statistics() const;
  std::vector<Event> events() const;
  std::vector<std::vector<std::string>> bucket_names() const;
  // Whether bucket `index` holds the gradient's memory.
  bool holds_gradient(size_t parameter) const;

  void before_accumulation() override;
  void before_output() override;
  void after_accumulation(size_t parameter) override;
  void end_of_backward(bool nested) override;
  void abandoned_backward() noexcept override;
  bool is_at_work() const override { return sync_; }

 private:
  struct Parameter {
    at::Tensor tensor;
    std::string name;
    Accumulator accumulator;  // none where it can't be trained
    bool travels = false;     // was trained when buckets were planned
    size_t bucket = 0;
    size_t slot = 0;
    bool ready = false;
    bool arrived = false;   // something was added to it in this pass
    at::Tensor with_graph;  // what backward(create_graph=True) gave, if its graph goes on
    std::unique_ptr<HeldHooks> hooks;
  };

  void refuse_shared() const;  // without the mutex

  // All of these with mutex_ held.
  void begin();
  void count_pass();
  void count_kept();
  void check_kept() const;
  void hold_hooks();
  std::vector<std::unique_ptr<HeldHooks>> hooks_to_run();
  void release_hooks() noexcept;
  bool trains() const;
  bool is_between();
  const Parameter* shared() const;  // with another reducer
  void listen_to_parameters();
  const Parameter* changed() const;  // a parameter that the buckets there are do not fit any more
  bool is_planned() const;           // whether there are buckets, and they fit what parameters are now
  void follow_parameters();
  void settle();
  void plan();
  void stow(Parameter& parameter);
  void check_fits(Parameter& parameter, const at::Tensor& view);
  void keep(Parameter& parameter);
  std::shared_ptr<const SideStream> side_stream(const at::Device& device);
  void start_ready();
  void start(size_t bucket, bool failed);
  void start_rest(bool failed);
  void tell_failure(bool has_begun) noexcept;
  void finish();
  void finish_or_tell();
  void hand_out(Parameter& parameter);
  void note(Event::Kind kind, size_t index);
  Instant now() const;
  void measure();
  at::Tensor& gradient(Parameter& parameter) { return parameter.tensor.mutable_grad(); }

  const Collective collective_;
  const Options options_;
  const OwnHook own_hook_;
  // Recursive: a signal handler of the program may look at the reducer while this very thread waits in a pass.
  mutable std::recursive_mutex mutex_;
  std::vector<Parameter> parameters_;
  std::map<std::string, std::shared_ptr<const SideStream>> side_streams_;  // by device
  std::vector<Bucket> buckets_;
  std::vector<std::vector<size_t>> members_;  // parameters of each bucket, by slot
  std::vector<size_t> num_missing_;           // of each bucket in this pass
  std::vector<int64_t> order_;                // of the first pass
  std::string planned_anew_for_;              // the parameter that has changed since buckets were planned before
  size_t next_bucket_ = 0;
  std::atomic<bool> sync_ = true;
  int64_t interval_ = 1;
  int64_t num_passes_ = 0;
  int64_t num_local_ = 0;  // backwards since the last pass, with the one that runs
  int last_task_ = -1;     // of the engine, that num_local_ counted
  bool in_pass_ = false;
  bool in_between_ = false;  // in a backward that only accumulates, by the interval
  bool watches_ = false;
  bool has_local_ = false;        // gradients may hold what was added since the last pass, which no pass has reduced
  bool is_alike_ = false;         // the last pass has left all ranks the same gradients
  int64_t num_kept_ = -1;         // of them those that were there when the first was added to; -1: not alike
  std::vector<size_t> arrivals_;  // of this pass
  bool failed_ = false;           // a failed pass is not settled yet
  bool hooks_raised_ = false;     // those of the last pass, which its messages could not tell any more
  bool records_ = false;
  Instant begin_, end_of_backward_;  // of this pass, while recording
  Statistics statistics_;
  std::vector<Event> events_;
};

}  // namespace torchtp::gradients
