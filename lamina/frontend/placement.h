// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

namespace torch::nn {
class Module;
}

// Statements on modules by hand: where they live, and that what they return varies. With `auto_partition` on, which
// is the default, set_partition counts and lamina places the others.
namespace lamina {

// Places a module, which is called as a Child, and those under it that are placed nowhere themselves; before the first
// step. Throws base::UsageError for what is no Child, or a negative index.
void set_partition(const torch::nn::Module& module, int index);

// Declares a module whose results vary in structure, shapes or dtypes from call to call by something that is no
// argument, as a counter or a random choice. Calls of it from other ranks, and of the modules it is in, wait for their
// results. Before the first step. Throws base::UsageError for what is no Child.
void set_dynamic(const torch::nn::Module& module);

// While it lives, what becomes a Child in this thread is placed on a partition, where `auto_partition` is off; else it
// is ignored, as in Python. The innermost counts; set_partition comes before all of them.
class Partition {
 public:
  explicit Partition(int index);
  ~Partition();
  Partition(const Partition&) = delete;

 private:
  const std::optional<int> before_;
};

namespace frontend {
std::optional<int> partition_around();  // that of this thread's innermost Partition
}

}  // namespace lamina
