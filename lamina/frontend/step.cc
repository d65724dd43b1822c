// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/step.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <numeric>

#include "lamina/base/error.h"
#include "lamina/base/printable.h"
#include "lamina/base/str.h"
#include "lamina/faces/sayings.h"
#include "lamina/frontend/current.h"
#include "lamina/pipeline/offsets.h"
#include "lamina/session/sharding.h"

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

at::Tensor piece(const at::Tensor& tensor, std::int64_t axis, const frontend::PartOf& part) {
  if (!tensor.defined() || tensor.dim() == 0) return tensor;
  const auto [begin, length] = part.pieces.of(size_of(tensor, axis, part.argument), part.microbatch);
  const auto view = tensor.narrow(axis, begin, length);
  // A body may write its piece. Views count the writes to all of the batch together, and autograd would take those of
  // other microbatches for a write to this one.
  return tensor.requires_grad() ? view : view.variable_data();
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

  pipeline::Pieces pieces(int microbatches, bool needs_all) const {
    std::vector<std::int64_t> sizes;
    for (const auto& part : parts) sizes.push_back(size_of(part.tensor, part.axis, part.place));
    return {sizes, microbatches, needs_all};
  }

  std::optional<base::UsageError> misfit(const pipeline::Pieces& pieces, int microbatches) const {
    if (!pieces.misfit()) return std::nullopt;
    const auto& [tensor, axis, place, is_said] = parts[pieces.misfit()->misfit];
    const auto& beside = parts[pieces.misfit()->beside];
    return faces::refusal("uneven", argument(tensor, place), microbatches, argument(beside.tensor, beside.place),
                          "pass lamina::whole(argument)");
  }

  // Why one of them has no pieces.
  std::optional<base::UsageError> offsets() const {
    std::vector<std::int64_t> lengths;
    for (const auto& part : parts) lengths.push_back(part.tensor.size(part.axis));
    for (const auto& [tensor, axis, place, is_said] : parts) {
      if (is_said || !pipeline::looks_like_offsets(tensor, lengths, /*is_called_so=*/false)) continue;
      return faces::refusal("offsets", argument(tensor, place), "lamina::whole(argument) of both",
                            "pass lamina::along(0, argument)");
    }
    return std::nullopt;
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
  const pipeline::Pieces uncut({}, configured);
  if (!current().session->job().leads()) return {uncut};
  const auto found = look_into(arguments);
  if (found.parts.empty()) {
    if (found.asked && configured > 1) {
      say_once(said.nothing,
               faces::said("nothing-to-split", configured, "pass what is to be whole as lamina::whole()"));
    }
    return {uncut};
  }
  auto pieces = found.pieces(configured, session::needs_all_microbatches(*current().session));
  if (configured == 1) return {std::move(pieces)};
  if (auto refused = found.misfit(pieces, configured)) return {uncut, std::move(refused)};
  const int count = pieces.microbatches();
  if (auto refused = count > 1 ? found.offsets() : std::nullopt) return {uncut, std::move(refused)};
  if (count < configured) {
    say_once(said.fewer, faces::said("fewer-microbatches", count, configured));
  }
  say_once(said.split,
           base::str("split into ", count, " microbatches: ", found.summary(),
                     ". To keep an argument whole: lamina::whole(argument); another axis: lamina::along(1, argument)"));
  return {std::move(pieces)};
} catch (const base::UsageError& error) {
  return {pipeline::Pieces({}, num_microbatches()), error};  // of the step, where all ranks hear of it
}

Value frontend::split(const Value& argument, std::int64_t axis, const PartOf& part) {
  Value pieces = argument;
  value::for_each_tensor(pieces, [&](at::Tensor& tensor) { tensor = piece(tensor, axis, part); });
  return pieces;
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
  const auto all = std::reduce(samples.begin(), samples.end(), std::int64_t{0});
  if (all == 0 || std::ranges::adjacent_find(samples, std::not_equal_to<>()) == samples.end()) return stacked.mean(0);
  std::vector<std::int64_t> shape(stacked.dim(), 1);
  shape[0] = -1;
  const auto wide = c10::isReducedFloatingType(stacked.scalar_type()) ? stacked.to(at::kFloat) : stacked;
  const auto weights = at::tensor(samples, at::kDouble).div(static_cast<double>(all)).view(shape);
  return wide.mul(weights.to(wide.device(), c10::toRealValueType(wide.scalar_type()))).sum(0).to(stacked.scalar_type());
}
at::Tensor StepOutput::reduce_sum() const { return stack().sum(0); }
at::Tensor StepOutput::concat() const { return outputs.front().dim() == 0 ? stack() : at::cat(outputs, 0); }
at::Tensor StepOutput::stack() const {
  for (const auto& output : outputs) {
    if (output.sizes() != outputs.front().sizes()) {
      throw faces::refusal("outputs-differ", outputs.front().sizes(), output.sizes());
    }
  }
  return at::stack(outputs, 0);
}

}  // namespace lamina
