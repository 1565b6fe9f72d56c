#include <c10/util/Exception.h>

#include <algorithm>

#include "spatial/checks.h"
#include "spatial/convolution.h"
#include "spatial/convolution_geometry.h"

namespace torchtp::spatial {
namespace {

void check_numbers(const char* op, const ConvolutionParams& params, int64_t num_dims) {
  const auto check = [&](const char* name, const std::vector<int64_t>& list, int64_t least) {
    check_list(op, name, list, num_dims);
    TORCH_CHECK_VALUE(std::all_of(list.begin(), list.end(), [&](int64_t number) { return number >= least; }), op, ": ",
                      name, least > 0 ? " must be positive, got " : " must not be negative, got ",
                      at::IntArrayRef(list));
  };
  check("stride", params.stride, 1);
  check("padding", params.padding, 0);
  check("dilation", params.dilation, 1);
  check("output_padding", params.output_padding, 0);
  TORCH_CHECK_VALUE(params.groups > 0, op, ": groups must be positive, got ", params.groups);
}

// ATen refuses what these refuse, too, but where it has something to compute alone.
void check_computed(const char* op, const at::Tensor& input, const ConvolutionParams& params) {
  const at::ScalarType type = input.scalar_type();
  const bool refused = type == at::kBool || (params.transposed && type != at::kLong && at::isIntegralType(type, false));
  TORCH_CHECK(!refused, op, params.transposed ? ", transposed," : "", " is not computed of ", type);
}

void check_type(const char* op, const char* name, const at::Tensor& parameter, const at::Tensor& input) {
  TORCH_CHECK(parameter.scalar_type() == input.scalar_type(), op, ": input and ", name, " are alike in dtype, got ",
              input.scalar_type(), " and ", parameter.scalar_type());
}

void check_weight(const char* op, const at::Tensor& input, const at::Tensor& weight, const ConvolutionParams& params) {
  const int64_t channels = input.size(1), groups = params.groups;
  TORCH_CHECK_VALUE(weight.dim() == input.dim(), op, ": a ", input.dim(),
                    "-dimensional input needs a weight of as many ", "dims, got ", weight.sizes());
  const at::IntArrayRef kernel = weight.sizes().slice(2);
  TORCH_CHECK_VALUE(std::all_of(kernel.begin(), kernel.end(), [](int64_t size) { return size > 0; }), op,
                    ": a kernel has one tap or more in each dim, got ", kernel);
  TORCH_CHECK_VALUE(weight.size(0) % groups == 0, op, ": the first dim of the weight cannot be divided into ", groups,
                    " groups, got ", weight.sizes());
  const int64_t taken = params.transposed ? weight.size(0) : weight.size(1) * groups;
  TORCH_CHECK_VALUE(taken == channels, op, ": a weight of ", weight.sizes(), " in ", groups, " groups is for ", taken,
                    " channels, but the input has ", channels);
  check_sizes(op, "weight", weight, weight.sizes(), input);
  check_type(op, "weight", weight, input);
}

}  // namespace

int64_t convolution_extent(const ConvolutionParams& params, const at::Tensor& weight, size_t index, int64_t extent) {
  const Window window = window_of(params, weight, index);
  return params.transposed ? transposed_extent(window, extent, params.output_padding[index])
                           : output_extent(window, extent);
}

std::vector<int64_t> own_output_sizes(const at::Tensor& input, const at::Tensor& weight,
                                      const ConvolutionParams& params, const std::vector<Cut>& cuts) {
  std::vector<int64_t> sizes{input.size(0), params.transposed ? weight.size(1) * params.groups : weight.size(0)};
  for (int64_t dim = 2; dim < input.dim(); ++dim) {
    sizes.push_back(convolution_extent(params, weight, dim - 2, input.size(dim)));
  }
  for (const Cut& cut : cuts) {
    sizes[cut.dim] =
        owned(convolution_extent(params, weight, cut.dim - 2, cut.extent), cut.group.size, cut.group.rank).size();
  }
  return sizes;
}

void check_convolution(const char* op, const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, const ConvolutionParams& params,
                       const std::vector<Cut>& cuts) {
  TORCH_CHECK_VALUE(input.dim() >= 3, op, ": input needs dims [N, C, ...] and a spatial one, got ", input.dim());
  check_computed(op, input, params);
  check_numbers(op, params, input.dim() - 2);
  check_weight(op, input, weight, params);
  if (bias && bias->defined()) {
    const int64_t channels = params.transposed ? weight.size(1) * params.groups : weight.size(0);
    check_sizes(op, "bias", *bias, at::IntArrayRef(channels), input);
    check_type(op, "bias", *bias, input);
  }
  std::vector<int64_t> extents = input.sizes().vec();
  for (const Cut& cut : cuts) {
    TORCH_CHECK_VALUE(cut.dim >= 2, op, ": dim ", cut.dim, " is not spatial; cut one of dims 2 to ", input.dim() - 1);
    extents[cut.dim] = cut.extent;
  }
  // Of uncut dims too: ranks that own no output would not get to ATen's own check.
  for (int64_t dim = 2; dim < input.dim(); ++dim) {
    const size_t index = dim - 2;
    TORCH_CHECK(
        !params.transposed || params.output_padding[index] < std::max(params.stride[index], params.dilation[index]), op,
        ": output_padding is less than stride or dilation, but in dim ", dim, " it is ", params.output_padding[index],
        " with stride ", params.stride[index], " and dilation ", params.dilation[index]);
    TORCH_CHECK(convolution_extent(params, weight, index, extents[dim]) > 0, op, ": kernel ", weight.size(dim),
                " with dilation ", params.dilation[index], " and padding ", params.padding[index],
                " does not fit into dim ", dim, " of global extent ", extents[dim]);
  }
}

void check_convolution_backward(const char* op, const at::Tensor& grad_output, const at::Tensor& input,
                                const at::Tensor& weight, const ConvolutionParams& params,
                                const std::vector<Cut>& cuts) {
  check_convolution(op, input, weight, {}, params, cuts);
  check_shards(op, input.sizes(), cuts);
  check_sizes(op, "grad_output", grad_output, own_output_sizes(input, weight, params, cuts), input);
}

}  // namespace torchtp::spatial
