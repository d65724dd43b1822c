// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/step.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <cstdio>

#include "lamina/base/error.h"
#include "lamina/base/printable.h"
#include "lamina/base/str.h"
#include "lamina/faces/sayings.h"
#include "lamina/frontend/current.h"
#include "lamina/pipeline/offsets.h"

namespace lamina {
namespace {

std::string argument(const at::Tensor& tensor, int place) {
  return base::str("argument ", place, " of shape ", tensor.sizes());
}

// Throws where it has no such axis.
std::int64_t size_of(const at::Tensor& tensor, std::int64_t axis, int place) {
  if (axis < -tensor.dim() || axis >= tensor.dim()) {
    throw faces::refusal("no-axis", argument(tensor, place), axis);
  }
  return tensor.size(axis);
}

// Why it cannot be split; "" where it can.
std::string uneven(const at::Tensor& tensor, int microbatches, std::int64_t axis, int place) {
  const auto size = size_of(tensor, axis, place);
  if (size % microbatches == 0) return "";
  return faces::said("uneven", argument(tensor, place), microbatches, size, axis, microbatches,
                     "pass lamina::whole(argument)");
}

at::Tensor piece(const at::Tensor& tensor, base::Microbatch microbatch, int microbatches, std::int64_t axis,
                 int place) {
  if (!tensor.defined() || tensor.dim() == 0) return tensor;
  if (const auto why = uneven(tensor, microbatches, axis, place); !why.empty())
    throw base::UsageError(why, base::Code{"step-uneven"});
  const auto size = size_of(tensor, axis, place);
  const auto length = size / microbatches;
  const auto part = tensor.narrow(axis, microbatch.value * length, length);
  // A body may write its piece. Views count the writes to all of the batch together, and autograd would take those of
  // other microbatches for a write to this one.
  return tensor.requires_grad() ? part : part.variable_data();
}

// The tensors of a call that are split, and lists that may be meant to be.
struct SplitTensors {
  struct Split {
    at::Tensor tensor;
    std::int64_t axis;
    int place;
    bool is_said;  // that it is split
  };
  std::vector<Split> parts;
  std::vector<std::pair<int, std::size_t>> lists;  // places, and lengths
  bool asked = false;                              // to split anything

  std::string uneven(int microbatches) const {
    for (const auto& [tensor, axis, place, is_said] : parts) {
      if (auto why = lamina::uneven(tensor, microbatches, axis, place); !why.empty()) return why;
    }
    return "";
  }

  // Why one of them has no pieces; "" where all have.
  std::string offsets() const {
    std::vector<std::int64_t> lengths;
    for (const auto& part : parts) lengths.push_back(part.tensor.size(part.axis));
    for (const auto& [tensor, axis, place, is_said] : parts) {
      if (is_said || !pipeline::looks_like_offsets(tensor, lengths, /*is_called_so=*/false)) continue;
      return faces::said("offsets", argument(tensor, place), "lamina::whole(argument) of both",
                         "pass lamina::along(0, argument)");
    }
    return "";
  }

  std::string summary() const {
    constexpr std::size_t kNamed = 8;
    std::string text, whole;
    for (std::size_t i = 0; i < std::min(parts.size(), kNamed); ++i) {
      text += base::str(i == 0 ? "" : ", ", argument(parts[i].tensor, parts[i].place), " along axis ", parts[i].axis);
    }
    if (parts.size() > kNamed) text += base::str(" and ", parts.size() - kNamed, " more");
    for (const auto& [place, length] : lists) {
      const bool is_batch = std::ranges::any_of(
          parts, [&](const Split& part) { return part.tensor.size(part.axis) == static_cast<std::int64_t>(length); });
      if (is_batch)
        whole +=
            base::str(whole.empty() ? "; whole to each: argument " : ", argument ", place, " (a list of ", length, ")");
    }
    return text + whole;
  }
};

SplitTensors look_into(const std::vector<frontend::Argument>& arguments) {
  SplitTensors found;
  for (std::size_t place = 0; place < arguments.size(); ++place) {
    if (!arguments[place].batch) continue;
    found.asked = true;
    Value batch = *arguments[place].batch;
    const auto before = found.parts.size();
    value::for_each_tensor(batch, [&](at::Tensor& tensor) {
      if (tensor.defined() && tensor.dim() > 0) {
        found.parts.push_back({tensor, arguments[place].axis, static_cast<int>(place), arguments[place].is_said});
      }
    });
    const auto* list = batch.get_if<value::List>();
    if (list != nullptr && found.parts.size() == before) found.lists.emplace_back(place, list->items.size());
  }
  return found;
}

void say_once(std::atomic<bool>& said, const std::string& line) {
  if (said.exchange(true) || rank() != 0) return;
  std::fputs(base::printable(base::str("lamina: a step function: ", line, "\n")).c_str(), stderr);
}

}  // namespace

frontend::Batch frontend::batch_of(const std::vector<Argument>& arguments, Said& said) try {
  const int configured = num_microbatches();
  if (configured == 1 || !current().session->job().leads()) return {configured, "", ""};
  const auto found = look_into(arguments);
  if (found.parts.empty()) {
    if (found.asked) {
      say_once(said.nothing,
               faces::said("nothing-to-split", configured, "pass what is to be whole as lamina::whole()"));
    }
    return {configured, "", ""};
  }
  const auto why = found.uneven(configured);
  if (auto offsets = why.empty() ? found.offsets() : ""; !offsets.empty()) return {configured, "", offsets};
  int fewer = configured;
  while (!found.uneven(fewer).empty()) --fewer;
  if (fewer < configured) {
    say_once(said.fewer, faces::said("fewer-microbatches", fewer, configured));
  }
  say_once(said.split,
           base::str("split into ", fewer, " microbatches: ", found.summary(),
                     ". To keep an argument whole: lamina::whole(argument); another axis: lamina::along(1, argument)"));
  return {fewer, why, ""};
} catch (const std::exception&) {
  return {num_microbatches(), "", ""};  // the body meets it again, inside the step, where all ranks hear of it
}

Value frontend::split(const Value& argument, base::Microbatch microbatch, int microbatches, std::int64_t axis,
                      int place) {
  Value part = argument;
  value::for_each_tensor(part,
                         [&](at::Tensor& tensor) { tensor = piece(tensor, microbatch, microbatches, axis, place); });
  return part;
}

Value frontend::detached(Value output) {
  value::for_each_tensor(output, [](at::Tensor& tensor) {
    if (tensor.defined()) tensor = tensor.detach();
  });
  return output;
}

base::Call frontend::step_call(const std::string& name, const CallSite& site) {
  const auto made = base::str(site.file_name(), ":", site.line());
  return {name.empty() ? base::str("made at ", made) : name, name.empty() ? "" : made, ""};
}

at::Tensor StepOutput::reduce_mean() const {
  auto stacked = stack();
  if (!stacked.is_floating_point() && !stacked.is_complex()) {
    stacked = stacked.to(c10::typeMetaToScalarType(c10::get_default_dtype()));
  }
  return stacked.mean(0);
}
at::Tensor StepOutput::reduce_sum() const { return stack().sum(0); }
at::Tensor StepOutput::concat() const { return outputs.front().dim() == 0 ? stack() : at::cat(outputs, 0); }
at::Tensor StepOutput::stack() const { return at::stack(outputs, 0); }

}  // namespace lamina
