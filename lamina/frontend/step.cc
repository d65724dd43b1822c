// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/step.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <numeric>
#include <set>

#include "lamina/base/error.h"
#include "lamina/base/log.h"
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

// The parts of a batch, and their names.
struct Walk {
  std::vector<pipeline::BatchPart> parts;
  std::vector<std::string> names;

  void add(const Value& value, const frontend::Argument& argument, const std::string& name) {
    const auto place = parts.size();
    parts.push_back({.end = place + 1});
    names.push_back(name);
    const auto add_items = [&](const std::vector<Value>& items) {
      for (std::size_t i = 0; i < items.size(); ++i) add(items[i], argument, base::str(name, "[", i, "]"));
      parts[place].kind = pipeline::BatchPart::Kind::kList;
      parts[place].size = static_cast<std::int64_t>(items.size());
    };
    if (const auto* tensor = value.get_if<at::Tensor>(); tensor != nullptr && tensor->defined()) {
      const auto axis = argument.axis < 0 ? argument.axis + tensor->dim() : argument.axis;
      if (axis < 0 || axis >= tensor->dim()) return;
      parts[place].kind = pipeline::BatchPart::Kind::kTensor;
      parts[place].size = tensor->size(axis);
      parts[place].dtype = static_cast<std::int64_t>(tensor->scalar_type());
      parts[place].dims = tensor->dim();
    } else if (const auto* list = value.get_if<value::List>()) {
      add_items(list->items);
    } else if (const auto* tuple = value.get_if<value::Tuple>(); tuple != nullptr && !is_size(*tuple)) {
      add_items(tuple->items);
    } else if (const auto* dict = value.get_if<value::Dict>()) {
      for (const auto& [key, held] : dict->items) add(held, argument, name);
      parts[place].kind = pipeline::BatchPart::Kind::kContainer;
    }
    parts[place].end = parts.size();
    if (argument.is_said) parts[place].known = pipeline::BatchPart::Known::kRows;
  }

 private:
  static bool is_size(const value::Tuple& tuple) {
    return std::ranges::all_of(tuple.items, [](const Value& item) {
      return item.get_if<bool>() != nullptr || item.get_if<std::int64_t>() != nullptr ||
             item.get_if<double>() != nullptr;
    });
  }
};

// The arguments that are lists with an element for each sample. Throws base::UsageError for a list that may be one, and
// for one inside of an argument.
std::set<std::size_t> lists_of_samples(const std::vector<frontend::Argument>& arguments, frontend::Said& said) {
  Walk walk;
  std::map<std::size_t, std::size_t> places;  // of parts that are arguments
  for (std::size_t place = 0; place < arguments.size(); ++place) {
    if (!arguments[place].batch) continue;
    places[walk.parts.size()] = place;
    walk.add(*arguments[place].batch, arguments[place], base::str("argument ", place));
  }
  for (std::size_t i = 0; i < walk.parts.size(); ++i) {
    if (const auto known = said.lists.find(walk.names[i]); known != said.lists.end()) {
      if (walk.parts[i].known == pipeline::BatchPart::Known::kNot) walk.parts[i].known = known->second;
    }
  }
  const auto found = pipeline::lists_of_samples(walk.parts);
  const auto refuse = [&](std::size_t part) -> base::UsageError {
    return faces::refusal(
        "list-not-clear", walk.names[part],
        "lamina::along(0, argument) cuts each tensor in it, lamina::whole(argument) gives it whole to "
        "each microbatch");
  };
  if (found.not_clear) throw refuse(*found.not_clear);
  std::set<std::size_t> lists;
  for (std::size_t i = 0; i < walk.parts.size(); ++i) {
    if (walk.parts[i].kind != pipeline::BatchPart::Kind::kList) continue;
    said.lists.emplace(walk.names[i], found.by_elements[i] ? pipeline::BatchPart::Known::kElements
                                                           : pipeline::BatchPart::Known::kRows);
    if (!found.by_elements[i]) continue;
    if (!places.contains(i)) throw refuse(i);
    lists.insert(places.at(i));
  }
  return lists;
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

std::vector<Value>* items_of(Value& value) {
  if (auto* list = value.get_if<value::List>()) return &list->items;
  auto* tuple = value.get_if<value::Tuple>();
  return tuple == nullptr ? nullptr : &tuple->items;
}

// The tensors of a call that are split, and lists that may be meant to be.
struct SplitTensors {
  struct Split {
    at::Tensor tensor;
    std::int64_t axis;
    int place;
    bool is_said;                // that it is split
    std::int64_t elements = -1;  // of a list of samples, in the place of a tensor

    std::int64_t size() const { return elements >= 0 ? elements : size_of(tensor, axis, place); }
    std::string words() const {
      return elements >= 0 ? base::str("argument ", place, " with ", elements, " samples") : argument(tensor, place);
    }
  };
  std::vector<Split> parts;
  std::vector<std::pair<int, std::size_t>> lists;  // places, and lengths
  bool asked = false;                              // to split anything

  pipeline::Pieces pieces(int microbatches, bool needs_all) const {
    std::vector<std::int64_t> sizes;
    for (const auto& part : parts) sizes.push_back(part.size());
    return {sizes, microbatches, needs_all};
  }

  std::optional<base::UsageError> misfit(const pipeline::Pieces& pieces, int microbatches) const {
    if (!pieces.misfit()) return std::nullopt;
    return faces::refusal("uneven", parts[pieces.misfit()->misfit].words(), microbatches,
                          parts[pieces.misfit()->beside].words(), "pass lamina::whole(argument)");
  }

  // Why one of them has no pieces.
  std::optional<base::UsageError> offsets() const {
    std::vector<std::int64_t> lengths;
    for (const auto& part : parts) lengths.push_back(part.size());
    for (const auto& [tensor, axis, place, is_said, elements] : parts) {
      if (is_said || elements >= 0 || !pipeline::looks_like_offsets(tensor, lengths, /*is_called_so=*/false)) continue;
      return faces::refusal("offsets", argument(tensor, place), "lamina::whole(argument) of both",
                            "pass lamina::along(0, argument)");
    }
    return std::nullopt;
  }

  std::string summary() const {
    constexpr std::size_t kNamed = 8;
    std::string text, whole;
    for (std::size_t i = 0; i < std::min(parts.size(), kNamed); ++i) {
      text += base::str(i == 0 ? "" : ", ", parts[i].words());
      text += parts[i].elements >= 0 ? " by elements" : base::str(" along axis ", parts[i].axis);
    }
    if (parts.size() > kNamed) text += base::str(" and ", parts.size() - kNamed, " more");
    for (const auto& [place, length] : lists) {
      const bool is_batch = std::ranges::any_of(
          parts, [&](const Split& part) { return part.size() == static_cast<std::int64_t>(length); });
      if (is_batch)
        whole +=
            base::str(whole.empty() ? "; whole to each: argument " : ", argument ", place, " (a list of ", length, ")");
    }
    return text + whole;
  }
};

SplitTensors look_into(const std::vector<frontend::Argument>& arguments, const std::set<std::size_t>& lists) {
  SplitTensors found;
  for (std::size_t place = 0; place < arguments.size(); ++place) {
    if (!arguments[place].batch) continue;
    found.asked = true;
    Value batch = *arguments[place].batch;
    if (lists.contains(place)) {
      const auto count = static_cast<std::int64_t>(items_of(batch)->size());
      found.parts.push_back({{}, 0, static_cast<int>(place), true, count});
      continue;
    }
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
  if (said.exchange(true) || rank() != 0 || !base::says(base::Level::kInfo)) return;
  std::fputs(base::printable(base::str("lamina: a step function: ", line, "\n")).c_str(), stderr);
}

}  // namespace

frontend::Batch frontend::batch_of(const std::vector<Argument>& arguments, Said& said) try {
  const int configured = num_microbatches();
  const pipeline::Pieces uncut({}, configured);
  if (!current().session->job().leads()) return {uncut};
  const auto lists = configured == 1 ? std::set<std::size_t>() : lists_of_samples(arguments, said);
  const auto found = look_into(arguments, lists);
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
  return {std::move(pieces), std::nullopt, lists};
} catch (const base::UsageError& error) {
  return {pipeline::Pieces({}, num_microbatches()), error};  // of the step, where all ranks hear of it
}

Value frontend::split(const Value& argument, std::int64_t axis, const PartOf& part) {
  Value pieces = argument;
  if (part.by_elements) {
    auto& items = *items_of(pieces);
    const auto [begin, length] = part.pieces.of(static_cast<std::int64_t>(items.size()), part.microbatch);
    items = std::vector(items.begin() + begin, items.begin() + begin + length);
    return pieces;
  }
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
