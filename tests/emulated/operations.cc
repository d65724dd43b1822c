// SPDX-License-Identifier: Apache-2.0
#include <ATen/EmptyTensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "tests/emulated/memory.h"
#include "tests/emulated/stream.h"
#include "tests/emulated/tensors.h"

// Operations that every device has of its own: making memory, and moving what is in it.
namespace emulated {
namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty_memory_format(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                               std::optional<c10::Device> device, std::optional<bool>,
                               std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &device_memory(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &device_memory(), kKeys, c10::dtype_or_default(dtype));
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  if (format) {
    impl->empty_tensor_restride(*format);
  }
  const auto needed = static_cast<std::size_t>(self.storage_offset() + self.numel()) * self.element_size();
  if (self.numel() > 0 && needed > self.storage().nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  }
  return self;
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  synchronize(current_stream(self.device().index()));
  return twin(self).item();
}

// Makes a stream wait for what another has now.
void order(const c10::Stream& later, const c10::Stream& earlier) {
  const auto event = Event::make();
  Event::record(event, earlier);
  Event::block(event, later);
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  if (self.numel() == 0) {
    return to;
  }
  const auto device = is_ours(to) ? to.device() : self.device();
  check(device.index());
  const c10::DeviceGuard guard(device);
  const auto stream = current_stream(device.index());
  const bool crosses = is_ours(self) && is_ours(to) && self.device() != to.device();
  if (crosses) {  // between devices a copy is ordered with the current streams of both
    order(stream, current_stream(self.device().index()));
  }
  // The memory of a pinned tensor is kept by what is recorded below.
  enqueue(stream, [from = bytes_of(self), into = bytes_of(to)] { as_kernel([&] { into.copy_(from); }); });
  if (crosses) {
    order(current_stream(self.device().index()), stream);
  }
  const auto& host = is_ours(self) ? to : self;
  if (is_ours(host)) {
    count_enqueued();
  } else if (non_blocking && is_pinned(host.const_data_ptr())) {
    record_pinned(host.const_data_ptr(), stream);
    count_enqueued();
  } else {
    synchronize(stream);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  device_memory().recordStream(self.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty_memory_format);
  library.impl("empty_strided", empty_strided);
  library.impl("resize_", resize);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("record_stream", record_stream);
}

// A copy reads what is conjugated or negated as it is; without these, torch would clone it first, for which it copies.
void let_copies_through(torch::Library& library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, Conjugate, library) { let_copies_through(library); }
TORCH_LIBRARY_IMPL(aten, Negative, library) { let_copies_through(library); }

}  // namespace
}  // namespace emulated
