#include "gradients/agreement.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>

namespace torchtp::gradients {
namespace {

const char* name_of(Compression compression) {
  switch (compression) {
    case Compression::kHalf:
      return "fp16";
    case Compression::kBFloat16:
      return "bf16";
    default:
      return "none";
  }
}

std::string describe(const at::Tensor& parameter, const std::string& name) {
  std::ostringstream text;
  text << "'" << name << "' " << c10::toString(parameter.scalar_type()) << " " << parameter.sizes() << " strides "
       << parameter.strides() << " on " << c10::DeviceTypeName(parameter.device().type(), true)
       << (parameter.requires_grad() ? "" : " frozen");
  return text.str();
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

}  // namespace

void check_agreement(const Collective& collective, const std::vector<at::Tensor>& parameters,
                     const std::vector<std::string>& names, const Options& options) {
  std::ostringstream mine;
  mine << "bucket_bytes=" << options.bucket_bytes << " first_bucket_bytes=" << options.first_bucket_bytes
       << " compression=" << name_of(options.compression) << " average=" << options.average << "\n";
  for (size_t i = 0; i < parameters.size(); ++i) mine << describe(parameters[i], names[i]) << "\n";
  const auto device = parameters.empty() ? at::Device(at::kCPU) : parameters.front().device();
  const std::vector<std::string> all = collective.all_gather(mine.str(), device);
  for (int rank = 1; rank < collective.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    const auto first = lines_of(all[0]);
    const auto other = lines_of(all[rank]);
    const auto line = static_cast<size_t>(
        std::mismatch(first.begin(), first.begin() + std::min(first.size(), other.size()), other.begin()).first -
        first.begin());
    const auto at = [line](const std::vector<std::string>& lines) {
      return line < lines.size() ? lines[line] : std::string("no such parameter");
    };
    TORCH_CHECK_VALUE(false, "gradients: all ranks must pass the same parameters in the same order, but rank 0 has ",
                      first.size() - 1, " and rank ", rank, " has ", other.size() - 1, ", and ",
                      line == 0 ? std::string() : "parameter " + std::to_string(line - 1) + " is ", at(first),
                      " on rank 0 and ", at(other), " on rank ", rank,
                      "; build the same model with the same settings on every rank");
  }
}

std::vector<int64_t> take_order(const Collective& collective, const std::vector<int64_t>& order,
                                const at::Device& device) {
  at::Tensor message = at::empty({static_cast<int64_t>(order.size())}, at::kLong);
  std::copy(order.begin(), order.end(), message.data_ptr<int64_t>());
  message = message.to(device);
  collective.broadcast(message, 0);
  message = message.to(at::kCPU);
  return {message.data_ptr<int64_t>(), message.data_ptr<int64_t>() + message.numel()};
}

}  // namespace torchtp::gradients
