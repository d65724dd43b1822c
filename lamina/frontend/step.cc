// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/step.h"

#include <algorithm>
#include <cstdio>

#include "lamina/base/error.h"
#include "lamina/base/log.h"
#include "lamina/base/printable.h"
#include "lamina/base/str.h"
#include "lamina/device/capabilities.h"
#include "lamina/device/rank_device.h"
#include "lamina/device/upload.h"
#include "lamina/faces/sayings.h"
#include "lamina/frontend/current.h"
#include "lamina/frontend/device_errors.h"
#include "lamina/pipeline/outputs.h"
#include "lamina/session/sharding.h"

namespace lamina {
namespace {

using pipeline::BatchSplitter;

constexpr pipeline::SplitWords kWords{
    .shape = [](at::IntArrayRef sizes) { return base::str(sizes); },
    .whole = "pass lamina::whole(argument)",
    .list = [](const std::string&) -> std::string {
      return "lamina::along(0, argument) cuts each tensor in it, lamina::whole(argument) gives it whole to each "
             "microbatch";
    },
    .offsets = "lamina::whole(argument) of both",
    .rows = "pass lamina::along(0, argument)",
    .nothing = "pass what is to be whole as lamina::whole()",
    .otherwise = "To keep an argument whole: lamina::whole(argument); another axis: lamina::along(1, argument)",
    .tensor_row = "argument {} of shape {}",
    .list_row = "argument {} with {} samples",
    .whole_row = "argument {} (a list of {})",
};

bool is_number(const Value& item) {
  return item.get_if<bool>() != nullptr || item.get_if<std::int64_t>() != nullptr || item.get_if<double>() != nullptr;
}

std::string path_of(const Value& key) {
  if (const auto* text = key.get_if<std::string>()) return base::str("['", *text, "']");
  const auto* number = key.get_if<std::int64_t>();
  return number == nullptr ? base::str("[", key.kind(), "]") : base::str("[", *number, "]");
}

// Tells the engine what a batch holds, from outside in.
void add(BatchSplitter& splitter, const Value& value, const std::string& name) {
  const auto add_items = [&](const std::vector<Value>& items, bool is_size) {
    splitter.begin_list(name, static_cast<std::int64_t>(items.size()), is_size);
    for (std::size_t i = 0; i < items.size(); ++i) add(splitter, items[i], base::str(name, "[", i, "]"));
    splitter.end();
  };
  if (const auto* tensor = value.get_if<at::Tensor>()) {
    splitter.add_tensor(name, *tensor);
  } else if (const auto* list = value.get_if<value::List>()) {
    add_items(list->items, false);
  } else if (const auto* tuple = value.get_if<value::Tuple>()) {
    add_items(tuple->items, std::ranges::all_of(tuple->items, is_number));
  } else if (const auto* dict = value.get_if<value::Dict>()) {
    splitter.begin_container(name);
    for (const auto& [key, held] : dict->items) add(splitter, held, name + path_of(key));
    splitter.end();
  } else {
    splitter.add_other(name);
  }
}

at::Tensor piece_of(const at::Tensor& tensor, std::int64_t axis, const pipeline::Pieces::Piece& piece) {
  if (tensor.layout() != at::kStrided) return tensor.narrow_copy(axis, piece.begin, piece.length);
  const auto view = tensor.narrow(axis, piece.begin, piece.length);
  // A body may write its piece. Views count the writes to all of the batch together, and autograd would take those of
  // other microbatches for a write to this one.
  return tensor.requires_grad() ? view : view.variable_data();
}

std::vector<Value>* items_of(Value& value) {
  if (auto* list = value.get_if<value::List>()) return &list->items;
  auto* tuple = value.get_if<value::Tuple>();
  return tuple == nullptr ? nullptr : &tuple->items;
}

// Makes the parts of a value for a microbatch, in the order in which `add` has told of it.
class Parts {
 public:
  Parts(const BatchSplitter& splitter, base::Microbatch microbatch) : splitter_(splitter), microbatch_(microbatch) {}

  // The part of the next value.
  Value next(const Value& value) {
    const auto number = next_;
    const auto cut = splitter_.cut(number);
    if (cut == BatchSplitter::Cut::kWithin) return within(value);
    next_ = splitter_.behind(number);
    if (cut != BatchSplitter::Cut::kRows && cut != BatchSplitter::Cut::kElements) return value;
    const auto piece = splitter_.piece(number, microbatch_);
    if (cut == BatchSplitter::Cut::kRows) return piece_of(value.as<at::Tensor>(), splitter_.axis(number), piece);
    const auto* list = value.get_if<value::List>();
    if (list == nullptr) {  // a tuple, whose type has all of its items
      throw faces::refusal("list-not-clear", "argument " + splitter_.name(number), kWords.list(""));
    }
    const auto begin = list->items.begin() + piece.begin;
    return value::List{{begin, begin + piece.length}};
  }

 private:
  Value within(Value value) {
    ++next_;
    if (auto* dict = value.get_if<value::Dict>()) {
      for (auto& [key, held] : dict->items) held = next(held);
      return value;
    }
    for (auto& item : *items_of(value)) item = next(item);
    return value;
  }

  const BatchSplitter& splitter_;
  base::Microbatch microbatch_;
  std::size_t next_ = 0;
};

// The part with its tensors of the host on the rank's device. Only now, for numbers that say how a batch is split are
// read on the host.
Value on_rank(Value part) {
  const auto device = devices::rank_device();
  if (devices::is_host(device)) return part;
  value::for_each_tensor(part, [&](at::Tensor& tensor) {
    if (tensor.defined() && devices::is_host(tensor)) tensor = devices::upload(tensor, device);
  });
  return part;
}

void say(const std::string& line) {
  if (rank() != 0 || !base::says(base::Level::kInfo)) return;
  std::fputs(base::printable(base::str("lamina: a step function: ", line, "\n")).c_str(), stderr);
}

}  // namespace

std::pair<frontend::Batch, std::vector<std::string>> frontend::split(const std::vector<Argument>& arguments,
                                                                     const Splitting& splitting, Said& said) {
  BatchSplitter splitter(splitting.microbatches, splitting.needs_all, kWords);
  for (std::size_t place = 0; place < arguments.size(); ++place) {
    const auto& [batch, axis, is_said] = arguments[place];
    if (!batch) continue;
    splitter.begin_argument(base::str(place), axis, is_said);
    add(splitter, *batch, base::str(place));
  }
  Batch batch{pipeline::Pieces({}, splitting.microbatches), std::vector<std::vector<Value>>(arguments.size())};
  try {
    splitter.decide(said.known);
    for (int i = 0; i < splitter.pieces().microbatches(); ++i) {
      Parts parts(splitter, base::Microbatch(i));
      for (std::size_t place = 0; place < arguments.size(); ++place) {
        if (arguments[place].batch) batch.parts[place].push_back(on_rank(parts.next(*arguments[place].batch)));
      }
    }
  } catch (const base::UsageError& error) {
    batch.refused = error;  // of the step, where all ranks hear of it
    return {batch, {}};
  }
  batch.pieces = splitter.pieces();
  std::vector<std::string> lines;
  for (const auto remark : splitter.remarks()) {
    if (said.remarks.insert(remark).second) lines.push_back(splitter.text(remark));
  }
  return {batch, lines};
}

frontend::Batch frontend::batch_of(const std::vector<Argument>& arguments, Said& said) {
  auto& session = *current().session;
  if (!session.job().leads()) return {pipeline::Pieces({}, num_microbatches())};
  const frontend::Splitting splitting{num_microbatches(), session::needs_all_microbatches(session)};
  auto [batch, lines] = frontend::explained([&] { return split(arguments, splitting, said); });
  for (const auto& line : lines) say(line);
  return batch;
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

at::Tensor StepOutput::reduce_mean() const { return pipeline::mean_of_outputs(outputs, samples); }
at::Tensor StepOutput::reduce_sum() const { return stack().sum(0); }
at::Tensor StepOutput::concat() const { return pipeline::concat_outputs(outputs); }
at::Tensor StepOutput::stack() const { return pipeline::stack_outputs(outputs); }

}  // namespace lamina
