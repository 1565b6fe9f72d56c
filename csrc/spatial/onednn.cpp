#include "spatial/onednn.h"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace torchtp::spatial {
namespace {

// ATen decides that by what the processor has.
bool answers_yes(const char* op) {
  const auto asks = c10::Dispatcher::singleton().findSchema({op, ""});
  return asks && asks->typed<bool()>().call();
}

}  // namespace

bool onednn_is_wide() {
  static const bool is = answers_yes("mkldnn::_is_mkldnn_bf16_supported");
  return is;
}

bool onednn_takes(const at::Tensor& input) {
  static const bool fp16 = answers_yes("mkldnn::_is_mkldnn_fp16_supported");
  if (!input.is_cpu() || !at::globalContext().userEnabledMkldnn()) return false;
  switch (input.scalar_type()) {
    case at::kFloat:
      return at::globalContext().hasMKLDNN();
    case at::kBFloat16:
      return onednn_is_wide();
    case at::kHalf:
      return fp16;
    default:
      return false;
  }
}

}  // namespace torchtp::spatial
