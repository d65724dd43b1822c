// SPDX-License-Identifier: Apache-2.0
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace emulated {
namespace {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

}  // namespace
}  // namespace emulated

// The lists of ATen's that CUDA has, too; their macros name what is of this namespace.
namespace at::autocast {

#define EMULATED_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define EMULATED_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define EMULATED_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(EMULATED_LOWER)
  AT_FORALL_FP32(EMULATED_FP32)
  AT_FORALL_PROMOTE(EMULATED_PROMOTE)
}

}  // namespace at::autocast
