// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/placement.h"

#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/faces/sayings.h"
#include "lamina/frontend/calls.h"
#include "lamina/frontend/current.h"
#include "lamina/frontend/model.h"

namespace lamina {
namespace {

thread_local std::optional<int> around;

int checked(int index) {
  if (index < 0) throw faces::refusal("not-a-partition", index);
  return index;
}

void require_before_cut(const char* what, const torch::nn::Module& module) {
  if (!frontend::has_current() || !frontend::current().pipelined()) return;
  const auto& model = frontend::current().model;
  if (model == nullptr || !model->partitioned() || model->tree().node(&module) < 0) return;
  throw faces::refusal("cut-already", what);
}

}  // namespace

void set_partition(const torch::nn::Module& module, int index) {
  checked(index);
  require_before_cut("set_partition()", module);
  frontend::place(&module, index);
}

void set_dynamic(const torch::nn::Module& module) {
  require_before_cut("set_dynamic()", module);
  frontend::vary(&module);
}

Partition::Partition(int index) : before_(std::exchange(around, checked(index))) {}
Partition::~Partition() { around = before_; }

std::optional<int> frontend::partition_around() { return around; }

}  // namespace lamina
