// SPDX-License-Identifier: Apache-2.0
#include "lamina/face/placement.h"

#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/face/calls.h"

namespace lamina {
namespace {

thread_local std::optional<int> around;

int checked(int index) {
  if (index < 0) throw base::UsageError(base::str("a partition is a number from 0 on, not ", index));
  return index;
}

}  // namespace

void set_partition(const torch::nn::Module& module, int index) { face::place(&module, checked(index)); }

void set_dynamic(const torch::nn::Module& module) { face::vary(&module); }

Partition::Partition(int index) : before_(std::exchange(around, checked(index))) {}
Partition::~Partition() { around = before_; }

std::optional<int> face::partition_around() { return around; }

}  // namespace lamina
