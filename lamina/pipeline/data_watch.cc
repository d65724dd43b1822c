// SPDX-License-Identifier: Apache-2.0
#include "lamina/pipeline/data_watch.h"

#include <algorithm>
#include <array>
#include <string_view>

namespace lamina::pipeline {
namespace {

thread_local DataWatch* this_thread = nullptr;

// tolist(), numpy() and the like read the memory, but resolve a lazy negation first, as nothing else does.
constexpr std::array<std::string_view, 17> kDataDependent = {"aten::resolve_neg",
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
                                                             "aten::unique_dim_consecutive"};

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

}  // namespace lamina::pipeline
