// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace lamina::runtime {

// While it lives, backwards that this thread begins stay wholly in it, also those of nodes on an accelerator, for which
// torch has threads of its own. So a node may wait for another rank, and what a checkpoint computes again knows the
// step that it belongs to.
class BackwardHere {
 public:
  BackwardHere();
  ~BackwardHere();
  BackwardHere(const BackwardHere&) = delete;

 private:
  const bool before_;
};

}  // namespace lamina::runtime
