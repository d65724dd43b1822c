// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "lamina/base/ids.h"

namespace lamina::runtime {

// [Note: flags of parameters] A parameter says itself whether it requires grad, once per process. A step body that sets
// this expects it to hold for all that it calls from then on, here or elsewhere, and for the next microbatch. So each
// context has flags of its own, which move with the compute slot as ProcessState does. What a body has set goes along
// with each of its requests, the backward ones too: autograd asks a leaf again when it accumulates. What the last
// microbatch leaves is everybody's after the step. While nobody sets any this costs one look at each per turn.
//
// A body begins with what the one before it left. Where the first one has set flags by the end of its first turn, the
// others begin when it is over; a body that changes them later than that, for good, is an error.
//
// The flags of one step. Used by whoever has the compute slot, and where no microbatch computes.
class ParameterFlags {
 public:
  // The tensors, alike on every rank of the pipeline; undefined where there is none at the moment.
  struct Watched {
    std::vector<std::string> names;
    std::vector<at::Tensor> tensors;
  };

  // Flags that somebody has set: requires_grad, by the number of the tensor. nullptr: none.
  using Flags = std::shared_ptr<const std::map<std::int64_t, bool>>;

  // The step begins: what the tensors say now holds where nobody sets anything.
  explicit ParameterFlags(std::shared_ptr<const Watched> watched);
  void end(Flags set);  // what they say from now on; nullptr: what they said at the beginning

  // Has the tensors say what `flags` and the beginning of the step do.
  void install(const Flags& flags);
  // `flags`, which were installed, and what was set since: the same object where that is nothing.
  Flags read(Flags flags);

  // Takes what was set since an install(nullptr) as if the step had begun with it.
  void adopt();

  // The name of a tensor of which the two say different things; "" for none.
  std::string difference(const Flags& a, const Flags& b) const;

  // Flags of step bodies: what the body of `microbatch` begins with, and what it has left. Throws base::UsageError
  // where the next one has begun with something else.
  Flags begin_body(base::Microbatch microbatch);
  void end_body(base::Microbatch microbatch, const Flags& left);
  // Says that the others are to wait for the end of this body, which has set `flags`.
  bool keeps_others(base::Microbatch microbatch, const Flags& flags) const;
  Flags left_by(base::Microbatch microbatch) const;

  // As bytes, and back. Throws base::FormatError.
  static std::string to_bytes(const Flags& flags);
  Flags from_bytes(std::string_view bytes) const;

 private:
  bool wanted(std::size_t number) const;  // by what is installed

  const std::shared_ptr<const Watched> watched_;
  std::vector<bool> at_begin_, now_;
  Flags installed_;
  std::map<base::Microbatch, Flags> began_, left_;
};

}  // namespace lamina::runtime
