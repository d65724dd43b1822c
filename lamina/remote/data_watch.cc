// SPDX-License-Identifier: Apache-2.0
#include "lamina/remote/data_watch.h"

#include <algorithm>
#include <array>
#include <string_view>

namespace lamina::remote {
namespace {

thread_local DataWatch* this_thread = nullptr;

constexpr std::array<std::string_view, 20> kDataDependent = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::bincount",
    "aten::equal",
    "aten::is_nonzero",
    "aten::repeat_interleave",
    "aten::nonzero_numpy",
    "aten::unique_consecutive",
    "aten::argwhere",
    "aten::item",
    "aten::allclose",
    "aten::unique_dim_consecutive",
    "aten::tensor_split",
    "aten::_pack_padded_sequence",
    "aten::_pad_packed_sequence",
    "aten::resolve_neg",  // the one operation of tolist() and numpy()
};

std::unique_ptr<at::ObserverContext> see(const at::RecordFunction& function) {
  if (std::ranges::find(kDataDependent, std::string_view(function.name())) != kDataDependent.end()) DataWatch::note();
  return nullptr;
}

}  // namespace

DataWatch::DataWatch()
    : outer_(std::exchange(this_thread, this)),
      handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(&see).scopes({at::RecordScope::FUNCTION}))) {}

DataWatch::~DataWatch() {
  at::removeCallback(handle_);
  this_thread = outer_;
}

void DataWatch::note() {
  for (DataWatch* watch = this_thread; watch != nullptr; watch = watch->outer_) watch->saw_ = true;
}

}  // namespace lamina::remote
