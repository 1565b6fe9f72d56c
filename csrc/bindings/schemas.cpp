// Every schema of the namespace torchtp, on one page. Implementations register beside their functions in spatial/.
//
// The cut of an op: cut_dims (non-negative tensor dims), cut_extents (their global extents in the op's input) and
// cut_groups (names of the process groups of the mesh axes they are cut over), one entry for each cut dim.
// Gradients of parameters are this rank's share: the gradient is their sum over the ranks.
#include <torch/library.h>

#define CUT "int[] cut_dims, int[] cut_extents, str[] cut_groups"
#define CONVOLUTION "int[] stride, int[] padding, int[] dilation, bool transposed, int[] output_padding, int groups"
#define DEPTHWISE "int[] stride, int[] padding, int[] dilation"
#define DEPTHWISE_LAYER_NORM                                                                            \
  "Tensor input, Tensor weight, Tensor? bias, Tensor? norm_weight, Tensor? norm_bias, float eps, bool " \
  "keep, " DEPTHWISE
#define MAX_POOL "int[] kernel_size, int[] stride, int[] padding, int[] dilation, bool ceil_mode"
#define AVG_POOL \
  "int[] kernel_size, int[] stride, int[] padding, bool ceil_mode, bool count_include_pad, int? divisor_override"
#define INTERPOLATE "str mode, int[] output_size, float[] scales, bool align_corners"

TORCH_LIBRARY(torchtp, m) {
  // begins[r] <= ends[r]: the rows rank r wants; beyond [0, extent) they are `fill`.
  m.def("pull(Tensor input, int dim, int extent, int[] begins, int[] ends, str group, float fill=0) -> Tensor");
  m.def("push_add(Tensor grad, int dim, int extent, int[] begins, int[] ends, str group) -> Tensor");
  // The halves of pull: the first result is complete after pull_finish. Not differentiable.
  m.def(
      "pull_start(Tensor input, int dim, int extent, int[] begins, int[] ends, str group, float fill=0)"
      " -> (Tensor, int)");
  m.def("pull_finish(Tensor(a!) extended, int ticket, str group) -> ()");

  m.def("convolution(Tensor input, Tensor weight, Tensor? bias, " CONVOLUTION ", " CUT ") -> Tensor");
  m.def("convolution_backward(Tensor grad_output, Tensor input, Tensor weight, " CONVOLUTION
        ", bool[3] output_mask, " CUT ") -> (Tensor, Tensor, Tensor)");

  // The same for one filter a channel, by the kernels that read halos where they arrive; convolution goes there by
  // itself. On the CPU for tests. Not differentiable; the backward's are of input and weight.
  m.def("depthwise(Tensor input, Tensor weight, Tensor? bias, " DEPTHWISE ", " CUT ") -> Tensor");
  m.def("depthwise_backward(Tensor grad_output, Tensor input, Tensor weight, " DEPTHWISE ", " CUT
        ") -> (Tensor, Tensor)");

  // The same for parts large enough on a device, where halos are not laid beside own rows. On the CPU for tests.
  m.def("border_convolution(Tensor input, Tensor weight, Tensor? bias, " DEPTHWISE ", int groups, " CUT ") -> Tensor");
  m.def("border_convolution_backward(Tensor grad_output, Tensor input, Tensor weight, " DEPTHWISE ", int groups, " CUT
        ") -> (Tensor, Tensor)");

  // Statistics over all ranks of the groups; what is saved is (mean, 1 / standard deviation).
  m.def(
      "batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
      "bool training, float momentum, float eps, str[] cut_groups) -> (Tensor, Tensor, Tensor)");
  m.def(
      "batch_norm_backward(Tensor grad_output, Tensor input, Tensor? weight, Tensor? running_mean, "
      "Tensor? running_var, Tensor save_mean, Tensor save_invstd, bool training, float eps, bool[3] output_mask, "
      "str[] cut_groups) -> (Tensor, Tensor, Tensor)");

  // Saved: (mean, rstd). group_norm: over all ranks of the groups; layer_norm_channels_first: over dim 1, local.
  m.def(
      "group_norm(Tensor input, Tensor? weight, Tensor? bias, int num_groups, float eps, str[] cut_groups)"
      " -> (Tensor, Tensor, Tensor)");
  m.def(
      "group_norm_backward(Tensor grad_output, Tensor input, Tensor? weight, Tensor mean, Tensor rstd, "
      "int num_groups, bool[3] output_mask, str[] cut_groups) -> (Tensor, Tensor, Tensor)");
  m.def(
      "layer_norm_channels_first(Tensor input, Tensor? weight, Tensor? bias, float eps)"
      " -> (Tensor, Tensor, Tensor)");
  m.def(
      "layer_norm_channels_first_backward(Tensor grad_output, Tensor input, Tensor? weight, Tensor mean, "
      "Tensor rstd, bool[3] output_mask) -> (Tensor, Tensor, Tensor)");

  // layer_norm_channels_first of a convolution with one filter a channel: also (the convolution's output, mean, rstd),
  // the first of them empty unless `keep` is set or a gradient is wanted. pieces: by the kernel that reads halos where
  // they arrive, where the other one goes by itself; on the CPU for tests, not differentiable.
  m.def("depthwise_layer_norm(" DEPTHWISE_LAYER_NORM ", " CUT ") -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("depthwise_layer_norm_pieces(" DEPTHWISE_LAYER_NORM ", " CUT ") -> (Tensor, Tensor, Tensor, Tensor)");

  // residual + branch * gamma[c] * keep[n]; local. The backward's are of branch and gamma.
  m.def("layer_scale(Tensor residual, Tensor branch, Tensor? gamma, Tensor? keep) -> Tensor");
  m.def(
      "layer_scale_backward(Tensor grad_output, Tensor branch, Tensor? gamma, Tensor? keep, bool[2] output_mask)"
      " -> (Tensor, Tensor)");

  // Indices are flat ones of the global plane; input_sizes are local.
  m.def("max_pool(Tensor input, " MAX_POOL ", " CUT ") -> (Tensor, Tensor)");
  m.def("max_pool_backward(Tensor grad_output, Tensor indices, int[] input_sizes, " MAX_POOL ", " CUT ") -> Tensor");
  m.def("max_pool_gather(Tensor input, Tensor indices, " MAX_POOL ", " CUT ") -> Tensor");
  m.def("avg_pool(Tensor input, " AVG_POOL ", " CUT ") -> Tensor");
  m.def("avg_pool_backward(Tensor grad_output, int[] input_sizes, " AVG_POOL ", " CUT ") -> Tensor");

  // mode: nearest, nearest-exact, linear, cubic, linear-antialias or cubic-antialias; output_size is global; a scale of
  // 0 means from the sizes.
  m.def("interpolate(Tensor input, " INTERPOLATE ", " CUT ") -> Tensor");
  m.def("interpolate_backward(Tensor grad_output, int[] input_sizes, " INTERPOLATE ", " CUT ") -> Tensor");
}
