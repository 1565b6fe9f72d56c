#include "bindings/kernels.h"

#include <ATen/Dispatch_v2.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "gradients/moves.h"
#include "kernels/depthwise_layer_norm.h"
#include "kernels/depthwise_weight_grad.h"
#include "kernels/halo_pack.h"
#include "kernels/narrow.h"
#include "spatial/device.h"

#ifdef TORCHTP_CUDA
#include "kernels/depthwise_cuda.h"
#include "kernels/depthwise_layer_norm_cuda.h"
#include "kernels/depthwise_weight_grad_cuda.h"
#include "kernels/halo_exchange_cuda.h"
#endif

namespace torchtp::bindings {
namespace {

using kernels::narrow;
using Optional = std::optional<at::Tensor>;
using Tensors = std::vector<at::Tensor>;
// Above, below, left, right; none where there is no halo.
using Halos = std::vector<Optional>;

#define TORCHTP_KERNEL_TYPES at::kFloat, at::kHalf, at::kBFloat16

bool channels_last(const at::Tensor& x) { return x.suggest_memory_format() == at::MemoryFormat::ChannelsLast; }

template <typename T>
const T* piece(const Optional& tensor, int64_t dim, int32_t& extent) {
  if (!tensor || tensor->numel() == 0) return nullptr;
  extent = narrow(tensor->size(dim));
  return tensor->const_data_ptr<T>();
}

template <typename T>
kernels::HaloPlanes<T> planes(const at::Tensor& own, const Halos& halos) {
  TORCH_CHECK_VALUE(halos.empty() || halos.size() == 4, "halos are above, below, left and right, not ", halos.size());
  kernels::HaloPlanes<T> out{};
  out.channels = narrow(own.size(1));
  out.height = narrow(own.size(2));
  out.width = narrow(own.size(3));
  out.own = own.const_data_ptr<T>();
  if (halos.empty()) return out;
  out.above = piece<T>(halos[0], 2, out.rows_above);
  out.below = piece<T>(halos[1], 2, out.rows_below);
  out.left = piece<T>(halos[2], 3, out.columns_left);
  out.right = piece<T>(halos[3], 3, out.columns_right);
  return out;
}

// `offset`: see DepthwiseAxis.
kernels::DepthwiseParams params_of(const at::Tensor& in, const at::Tensor& out, const at::Tensor& weight,
                                   const std::pair<int64_t, int64_t>& offset, int64_t stride, int64_t dilation) {
  const auto axis = [&](int64_t dim, int64_t begin) {
    return kernels::DepthwiseAxis{narrow(weight.size(dim)), narrow(stride), narrow(dilation), narrow(begin)};
  };
  return {in.size(0),          narrow(in.size(1)),    narrow(in.size(2)),     narrow(in.size(3)), narrow(out.size(2)),
          narrow(out.size(3)), axis(2, offset.first), axis(3, offset.second), channels_last(in)};
}

kernels::Part part_of(const std::string& name) {
  if (name == "all") return kernels::Part::kAll;
  TORCH_CHECK_VALUE(name == "interior" || name == "border", "part is all, interior or border, not ", name);
  return name == "interior" ? kernels::Part::kInterior : kernels::Part::kBorder;
}

// Calls cuda(stream) or cpu(), where the tensor lies.
template <typename Cuda, typename Cpu>
void where(const at::Tensor& tensor, const Cuda& cuda, const Cpu& cpu) {
#ifdef TORCHTP_CUDA
  if (!tensor.is_cpu()) {
    const spatial::OnDevice device(tensor);
    cuda(device.stream());
    return;
  }
#endif
  TORCH_CHECK_VALUE(tensor.is_cpu(), "this build has no kernels for ", tensor.device());
  cpu();
}

#ifdef TORCHTP_CUDA
#define TORCHTP_ON(stream, ...) [&](cudaStream_t stream) { __VA_ARGS__; }
#else
#define TORCHTP_ON(stream, ...) [](int) {}
#endif

void depthwise(const at::Tensor& own, const Halos& halos, const at::Tensor& weight, const Optional& bias,
               const at::Tensor& out, std::pair<int64_t, int64_t> offset, int64_t stride, int64_t dilation,
               const std::string& part) {
  const auto params = params_of(own, out, weight, offset, stride, dilation);
  const auto which = part_of(part);
  AT_DISPATCH_V2(own.scalar_type(), "depthwise", AT_WRAP([&] {
                   const auto in = planes<scalar_t>(own, halos);
                   const scalar_t* const w = weight.const_data_ptr<scalar_t>();
                   const scalar_t* const b = bias ? bias->const_data_ptr<scalar_t>() : nullptr;
                   scalar_t* const to = out.mutable_data_ptr<scalar_t>();
                   where(own, TORCHTP_ON(stream, kernels::launch_depthwise(in, w, b, to, params, which, stream)),
                         [&] { kernels::depthwise_cpu(in, w, b, to, params, which); });
                 }),
                 TORCHTP_KERNEL_TYPES);
}

// norm: weight and bias in float; outputs: the output, the convolution's output (or none), mean and rstd in float.
void depthwise_layer_norm(const at::Tensor& own, const Halos& halos, const at::Tensor& weight, const Optional& bias,
                          const std::pair<at::Tensor, at::Tensor>& norm, double eps,
                          const std::tuple<at::Tensor, Optional, at::Tensor, at::Tensor>& outputs,
                          std::pair<int64_t, int64_t> offset, const std::string& part) {
  const at::Tensor &out = std::get<0>(outputs), &mean = std::get<2>(outputs), &rstd = std::get<3>(outputs);
  const Optional& convolved = std::get<1>(outputs);
  const auto params = params_of(own, out, weight, offset, 1, 1);
  const auto which = part_of(part);
  TORCH_CHECK_VALUE(
      kernels::depthwise_layer_norm_fits(params, own.element_size(), spatial::most_shared_bytes(own)),
      "depthwise_layer_norm: the kernel takes images of which 32 positions with all channels fit into a block");
  AT_DISPATCH_V2(own.scalar_type(), "depthwise_layer_norm", AT_WRAP([&] {
                   const auto in = planes<scalar_t>(own, halos);
                   const kernels::DepthwiseLayerNormArgs<scalar_t> args{
                       weight.const_data_ptr<scalar_t>(),
                       bias ? bias->const_data_ptr<scalar_t>() : nullptr,
                       norm.first.const_data_ptr<float>(),
                       norm.second.const_data_ptr<float>(),
                       static_cast<float>(eps),
                       out.mutable_data_ptr<scalar_t>(),
                       convolved ? convolved->mutable_data_ptr<scalar_t>() : nullptr,
                       mean.mutable_data_ptr<float>(),
                       rstd.mutable_data_ptr<float>()};
                   where(own, TORCHTP_ON(stream, kernels::launch_depthwise_layer_norm(in, args, params, which, stream)),
                         [&] { kernels::depthwise_layer_norm_cpu(in, args, params, which); });
                 }),
                 TORCHTP_KERNEL_TYPES);
}

void depthwise_input_grad(const at::Tensor& own, const Halos& halos, const at::Tensor& weight, const at::Tensor& out,
                          std::pair<int64_t, int64_t> offset, int64_t stride, int64_t dilation,
                          const std::string& part) {
  const auto params = params_of(out, own, weight, offset, stride, dilation);
  const auto which = part_of(part);
  AT_DISPATCH_V2(own.scalar_type(), "depthwise_input_grad", AT_WRAP([&] {
                   const auto in = planes<scalar_t>(own, halos);
                   const scalar_t* const w = weight.const_data_ptr<scalar_t>();
                   scalar_t* const to = out.mutable_data_ptr<scalar_t>();
                   where(own,
                         TORCHTP_ON(stream, kernels::launch_depthwise_input_grad(in, w, to, params, which, stream)),
                         [&] { kernels::depthwise_input_grad_cpu(in, w, to, params, which); });
                 }),
                 TORCHTP_KERNEL_TYPES);
}

void depthwise_weight_grad(const at::Tensor& x, const at::Tensor& dy, const Halos& dy_halos, const at::Tensor& out,
                           std::pair<int64_t, int64_t> offset, int64_t stride, int64_t dilation) {
  const auto params = params_of(x, dy, out, offset, stride, dilation);
  AT_DISPATCH_V2(
      x.scalar_type(), "depthwise_weight_grad", AT_WRAP([&] {
        const auto in = planes<scalar_t>(x, {}), grads = planes<scalar_t>(dy, dy_halos);
        scalar_t* const to = out.mutable_data_ptr<scalar_t>();
        const int64_t floats = kernels::depthwise_weight_grad_scratch(in, grads, params, spatial::most_shared_bytes(x));
        const at::Tensor scratch = at::empty({floats}, x.options().dtype(at::kFloat));
        float* const sums = scratch.mutable_data_ptr<float>();
        where(x, TORCHTP_ON(stream, kernels::launch_depthwise_weight_grad(in, grads, to, sums, params, stream)),
              [&] { kernels::depthwise_weight_grad_cpu(in, grads, to, sums, params); });
      }),
      TORCHTP_KERNEL_TYPES);
}

kernels::HaloSlabs slabs_of(const at::Tensor& tensor, int64_t dim, const std::pair<int64_t, int64_t>& starts,
                            const std::pair<int64_t, int64_t>& depths) {
  TORCH_CHECK_VALUE(tensor.is_contiguous(), "halo_pack: the tensor is contiguous in the order of its dims");
  kernels::HaloSlabs slabs{1, tensor.size(dim), 1, {starts.first, starts.second}, {depths.first, depths.second}};
  for (int64_t other = 0; other < tensor.dim(); ++other) {
    if (other < dim) slabs.outer *= tensor.size(other);
    if (other > dim) slabs.inner *= tensor.size(other);
  }
  return slabs;
}

void halo_pack(const at::Tensor& tensor, const at::Tensor& packed, int64_t dim, std::pair<int64_t, int64_t> starts,
               std::pair<int64_t, int64_t> depths) {
  const auto slabs = slabs_of(tensor, dim, starts, depths);
  TORCH_CHECK_VALUE(packed.numel() == slabs.packed_elements(), "halo_pack: ", slabs.packed_elements(), " elements");
  const void* const from = tensor.const_data_ptr();
  void* const to = packed.mutable_data_ptr();
  const size_t bytes = tensor.element_size();
  where(tensor, TORCHTP_ON(stream, kernels::launch_halo_pack(kernels::packing(from, to, slabs, bytes), stream)),
        [&] { kernels::halo_pack_cpu(kernels::packing(from, to, slabs, bytes)); });
}

void halo_unpack(const at::Tensor& packed, const at::Tensor& tensor, int64_t dim, std::pair<int64_t, int64_t> starts,
                 std::pair<int64_t, int64_t> depths) {
  const auto slabs = slabs_of(tensor, dim, starts, depths);
  TORCH_CHECK_VALUE(packed.numel() == slabs.packed_elements(), "halo_unpack: ", slabs.packed_elements(), " elements");
  const void* const from = packed.const_data_ptr();
  void* const to = tensor.mutable_data_ptr();
  const size_t bytes = tensor.element_size();
  where(tensor, TORCHTP_ON(stream, kernels::launch_halo_take(kernels::unpacking(from, to, slabs, bytes), stream)),
        [&] { kernels::halo_take_cpu(kernels::unpacking(from, to, slabs, bytes)); });
}

std::vector<gradients::Move> moves_of(const Tensors& tensors) {
  std::vector<gradients::Move> moves;
  int64_t begin = 0;
  for (const at::Tensor& tensor : tensors) {
    moves.push_back({tensor, begin});
    begin += tensor.numel();
  }
  return moves;
}

void bucket_pack(const Tensors& tensors, const at::Tensor& flat, double scale) {
  gradients::pack(moves_of(tensors), flat, scale);
}

void bucket_unpack(const at::Tensor& flat, const Tensors& tensors, double scale) {
  gradients::unpack(moves_of(tensors), flat, scale);
}

// [norm, clipping factor, 1 if an element was not finite], where `flat` lies.
at::Tensor bucket_clip(const at::Tensor& flat, double most) { return gradients::norm_and_factor({flat}, most); }

}  // namespace

void bind_kernels(pybind11::module_& module) {
  namespace py = pybind11;
  py::module_ m = module.def_submodule("kernels");
  m.def("depthwise", &depthwise, py::arg("own"), py::arg("halos"), py::arg("weight"), py::arg("bias"), py::arg("out"),
        py::arg("offset"), py::arg("stride") = 1, py::arg("dilation") = 1, py::arg("part") = "all");
  m.def("depthwise_layer_norm", &depthwise_layer_norm, py::arg("own"), py::arg("halos"), py::arg("weight"),
        py::arg("bias"), py::arg("norm"), py::arg("eps"), py::arg("outputs"), py::arg("offset"),
        py::arg("part") = "all");
  m.def("depthwise_input_grad", &depthwise_input_grad, py::arg("own"), py::arg("halos"), py::arg("weight"),
        py::arg("out"), py::arg("offset"), py::arg("stride") = 1, py::arg("dilation") = 1, py::arg("part") = "all");
  m.def("depthwise_weight_grad", &depthwise_weight_grad, py::arg("x"), py::arg("dy"), py::arg("dy_halos"),
        py::arg("out"), py::arg("offset"), py::arg("stride") = 1, py::arg("dilation") = 1);
  m.def("halo_pack", &halo_pack, py::arg("tensor"), py::arg("packed"), py::arg("dim"), py::arg("starts"),
        py::arg("depths"));
  m.def("halo_unpack", &halo_unpack, py::arg("packed"), py::arg("tensor"), py::arg("dim"), py::arg("starts"),
        py::arg("depths"));
  m.def("bucket_pack", &bucket_pack, py::arg("tensors"), py::arg("flat"), py::arg("scale") = 1.0);
  m.def("bucket_unpack", &bucket_unpack, py::arg("flat"), py::arg("tensors"), py::arg("scale") = 1.0);
  m.def("bucket_clip", &bucket_clip, py::arg("flat"), py::arg("most"));
}

}  // namespace torchtp::bindings
