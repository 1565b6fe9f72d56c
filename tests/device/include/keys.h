#pragma once

#include <torch/library.h>

// Included before everything: what csrc registers for CUDA tensors is registered for the device of device.cpp, and what
// it registers for others not again, since the extension itself has done so.
#undef TORCH_LIBRARY_IMPL
#define TORCH_LIBRARY_IMPL(ns, key, m) TORCHTP_REGISTER_##key(ns, m, C10_UID)
#define TORCHTP_REGISTER_CUDA(ns, m, uid) _TORCH_LIBRARY_IMPL(ns, PrivateUse1, m, uid)
#define TORCHTP_REGISTER_PrivateUse1(ns, m, uid) _TORCH_LIBRARY_IMPL(ns, PrivateUse1, m, uid)
#define TORCHTP_REGISTER__(ns, m, uid) _TORCH_LIBRARY_IMPL(ns, _, m, uid)
#define TORCHTP_REGISTER_CPU(ns, m, uid) TORCHTP_NOT_AGAIN(m, uid)
#define TORCHTP_REGISTER_Meta(ns, m, uid) TORCHTP_NOT_AGAIN(m, uid)
#define TORCHTP_REGISTER_Autograd(ns, m, uid) TORCHTP_NOT_AGAIN(m, uid)
#define TORCHTP_NOT_AGAIN(m, uid) [[maybe_unused]] static void C10_CONCATENATE(not_again_, uid)(torch::Library & m)
