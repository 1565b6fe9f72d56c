#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <memory>
#include <vector>

namespace torchtp::gradients {

// What autograd tells its listener, from whichever thread it runs on.
class Listener {
 public:
  virtual ~Listener() = default;
  virtual void before_accumulation() = 0;                 // a gradient is about to be added to some parameter's
  virtual void before_output() = 0;                       // a gradient is about to flow into a watched output
  virtual void after_accumulation(size_t parameter) = 0;  // it has been
  // The backward that begin_backward() was called in is over; `nested`: inside another backward.
  virtual void end_of_backward(bool nested) = 0;
  virtual void abandoned_backward() noexcept = 0;  // it has thrown
  virtual bool is_at_work() const = 0;             // now, or it may be in the next backward
};

// The node that adds to a parameter's gradient; alive as long as somebody holds it. Its type differs between versions.
using Accumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

// Whether `parameter` is trained, or may be one day.
bool may_train(const at::Tensor& parameter);

// Has `listener` told before and after every gradient is added to `parameter`, between the hooks of its gradient and
// those that run after accumulation, for as long as the listener lives and the accumulator is held; also of one that is
// frozen as yet. PyTorch gives a parameter another accumulator when its data get another dtype or device: then, and
// only then, other than `before` is returned.
Accumulator listen(const at::Tensor& parameter, size_t index, const std::weak_ptr<Listener>& listener,
                   const Accumulator& before);

// Has the listener told before the hooks of the parameter's gradient, if there are any, see one that is about to be
// added. They may be taken off then, each put something else in place of: not its number changed. To be called again
// when Python has made its table of hooks, which throws away those of C++.
void listen_first(const at::Tensor& parameter, const Accumulator& accumulator, const std::weak_ptr<Listener>& listener);
bool is_of_listener(const torch::autograd::FunctionPreHook& hook);

// Before anything is added: has the listener told after all other hooks of the accumulator, which may read the gradient
// (DistributedDataParallel's do). False where another listener hears of it too, and is at work.
bool listen_last(const Accumulator& accumulator, const Listener* listener);

// Has Python drop what only cycles keep alive. Takes its lock.
void collect_garbage();

// Has `listener` told when a gradient flows into `output`.
void listen_to_output(const at::Tensor& output, const std::weak_ptr<Listener>& listener);

// Within a backward: whether it may add to gradients of parameters; torch.autograd.grad() does not.
bool accumulates_into(const std::vector<Accumulator>& accumulators);

// Within a backward: its number, different from that of every other.
int current_backward();

// Within a backward: promises `listener` one of end_of_backward and abandoned_backward.
void begin_backward(const std::weak_ptr<Listener>& listener);

}  // namespace torchtp::gradients
