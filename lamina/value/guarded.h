// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>

#include "lamina/value/where_cut.h"

namespace lamina::value {

// [Note: guarded slices] A parameter of which this rank has a slice computes like any tensor, so that a norm, a product
// or random numbers of it would be taken for those of the whole. So a slice is guarded: it keeps its memory, and its
// key set holds the wrapper key, whose kernels judge each operation. Views, copies and what is done element by element
// are right for a slice: updates by hand, averages, clipping. What they give is guarded in its turn. Anything else
// throws base::UsageError with the parameter, the operation and the remedy. The layer itself computes with unguarded().
// Places by index are right along a dimension that is not cut, so it is known of each slice and its views which one is,
// and of what slices were joined into, where each begins.
// The gradient of a slice is one, too, once it is read outside of the engine.
void guard(const at::Tensor& slice, const std::string& name, at::IntArrayRef whole);
// Guards the gradient of a slice, as that is; does nothing for others, and in the engine's own work.
void guard_gradient(const at::Tensor& gradient, const at::Tensor& parameter);
// Guards one that was guarded before it was given another value, and is a slice again.
void guard_again(const at::Tensor& slice);
// Guards what comes of a slice: a view of it, or what was computed of its elements.
void guard_view(const at::Tensor& made, const at::Tensor& slice);
void guard_like(const at::Tensor& made, const at::Tensor& slice);
// Does `set`, which gives a tensor another value, as `tensor.data = ...` does: it is guarded after that where it was a
// slice before, and has the shape of that again.
void guard_as_before(const at::Tensor& tensor, const std::function<void()>& set);

bool is_slice(const at::Tensor& tensor);             // that was guarded, wherever its value is
bool is_guarded(const at::Tensor& tensor);           // and whose value is here
std::string why_guarded(const at::Tensor& tensor);   // of what it is a slice; "" for a tensor that is not guarded
std::string name_guarded(const at::Tensor& tensor);  // of the parameter, also while its value is away

// Says for a guarded slice where that is cut.
WhereCut where_cut(const at::Tensor& slice);
bool is_gradient_of_slice(const at::Tensor& tensor);

// Gives the same memory, with its gradients, to who knows that it is a slice.
at::Tensor unguarded(const at::Tensor& slice);

// While one is alive, this thread does as it likes with slices: the engine's own work.
class Unguarded {
 public:
  Unguarded();
  ~Unguarded();
  Unguarded(const Unguarded&) = delete;
  static bool here();
};

// While one is alive, this thread's work is judged, in a backward, too: a hook of the program's.
class Judged {
 public:
  Judged();
  ~Judged();
  Judged(const Judged&) = delete;
  static bool here();

 private:
  const bool before_;
  const int open_before_;
};

// While this holds, what this thread computes of slices element by element is not guarded, as states of optimizers are.
void set_updating(bool updates);
bool is_updating();

class Updating {
 public:
  Updating() : before_(is_updating()) { set_updating(true); }
  ~Updating() { set_updating(before_); }
  Updating(const Updating&) = delete;

 private:
  const bool before_;
};

}  // namespace lamina::value
