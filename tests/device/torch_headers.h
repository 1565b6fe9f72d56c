#pragma once

// What most files of csrc/spatial include, parsed once for all of them.
#include <ATen/Dispatch_v2.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>

#include "keys.h"
