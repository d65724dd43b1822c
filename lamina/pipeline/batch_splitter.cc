// SPDX-License-Identifier: Apache-2.0
#include "lamina/pipeline/batch_splitter.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <set>
#include <span>
#include <tuple>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/joined.h"
#include "lamina/base/str.h"
#include "lamina/device/capabilities.h"
#include "lamina/faces/sayings.h"
#include "lamina/pipeline/offsets.h"

namespace lamina::pipeline {
namespace {

using BatchKind = BatchPart::Kind;
using Known = BatchPart::Known;

// The layout of a tensor that has no pieces, as torch names it; "" for one that has.
std::string_view unsplit_layout(const at::Tensor& tensor) {
  if (tensor.is_nested()) return "nested";
  switch (tensor.layout()) {
    case at::kStrided:
    case at::kSparse:
      return "";
    case at::kSparseCsr:
      return "sparse_csr";
    case at::kSparseCsc:
      return "sparse_csc";
    case at::kSparseBsr:
      return "sparse_bsr";
    case at::kSparseBsc:
      return "sparse_bsc";
    default:
      return "_mkldnn";
  }
}

// True for names of cumulative offsets.
bool names_offsets(std::string name) {
  constexpr std::array kWords{"offset", "cuseq", "cu_seq", "indptr", "rowptr", "row_ptr", "cumulat"};
  std::ranges::transform(name, name.begin(), [](unsigned char each) { return std::tolower(each); });
  return std::ranges::any_of(kWords, [&](const char* word) { return name.find(word) != std::string::npos; });
}

}  // namespace

BatchSplitter::BatchSplitter(int microbatches, bool needs_all, const SplitWords& words)
    : asked_(microbatches), needs_all_(needs_all), words_(words), pieces_({}, microbatches) {}

void BatchSplitter::begin_argument(std::string name, std::int64_t axis, bool is_said) {
  arguments_.push_back({std::move(name), axis, is_said});
}

BatchSplitter::Item& BatchSplitter::add(std::string name, Kind kind) {
  const auto number = items_.size();
  const auto parent = open_.empty() ? kNone : open_.back();
  items_.push_back({std::move(name), arguments_.size() - 1, parent, static_cast<int>(open_.size()), kind});
  items_.back().part.end = number + 1;
  return items_.back();
}

void BatchSplitter::add_tensor(std::string name, const at::Tensor& tensor) {
  if (!tensor.defined()) return add_other(std::move(name));
  const auto layout = unsplit_layout(tensor);
  const auto sizes = layout == "nested" ? std::vector<std::int64_t>(tensor.dim()) : tensor.sizes().vec();
  const auto identity = reinterpret_cast<std::uintptr_t>(tensor.unsafeGetTensorImpl());
  add_array(std::move(name), {sizes, static_cast<std::int64_t>(tensor.scalar_type()), identity, tensor});
  if (layout.empty()) return;
  items_.back().type = base::str("tensor of the kind ", layout);
  if (layout == "nested") items_.back().part.kind = BatchKind::kOther;  // it has no rows
}

void BatchSplitter::add_array(std::string name, Array array) {
  auto& item = add(std::move(name), Kind::kTensor);
  item.shape = std::move(array.shape);
  item.identity = array.identity;
  item.values = std::move(array.values);
  const auto dims = static_cast<std::int64_t>(item.shape.size()), axis = argument(item).axis;
  if (axis < -dims || axis >= dims) return;
  const auto number = items_.size() - 1;
  item.part = {BatchKind::kTensor, size(item), number + 1, array.dtype, dims};
}

void BatchSplitter::add_self_slicing(std::string name, const std::string& type) {
  add(std::move(name), Kind::kSelfSlicing).type = type;
}
void BatchSplitter::add_read_once(std::string name, const std::string& type) {
  add(std::move(name), Kind::kReadOnce).type = type;
}
void BatchSplitter::add_packed(std::string name, const std::string& type) {
  add(std::move(name), Kind::kPacked).type = type;
}
void BatchSplitter::add_other(std::string name) { add(std::move(name), Kind::kOther); }

void BatchSplitter::begin_list(std::string name, std::int64_t size, bool is_size, std::uintptr_t identity) {
  auto& item = add(std::move(name), Kind::kList);
  open_.push_back(items_.size() - 1);
  item.part.size = size;
  item.part.kind = is_size ? BatchKind::kOther : BatchKind::kList;
  item.identity = identity;
}

void BatchSplitter::begin_container(std::string name) {
  add(std::move(name), Kind::kOther).part.kind = BatchKind::kContainer;
  open_.push_back(items_.size() - 1);
}

void BatchSplitter::end() {
  items_[open_.back()].part.end = items_.size();
  open_.pop_back();
}

Lists BatchSplitter::lists(KnownParts& known) {
  std::vector<BatchPart> parts;
  for (const auto& item : items_) {
    auto& part = parts.emplace_back(item.part);
    const auto found = known.lists.find(item.name);
    if (argument(item).is_said) {
      part.known = Known::kRows;
    } else if (found != known.lists.end()) {
      part.known = found->second;
    }
  }
  auto found = lists_of_samples(parts);
  for (std::size_t i = 0; i < items_.size() && !found.not_clear; ++i) {
    if (parts[i].kind != BatchKind::kList) continue;
    known.lists.emplace(items_[i].name, found.by_elements[i] ? Known::kElements : Known::kRows);
  }
  return found;
}

void BatchSplitter::decide(KnownParts& known) {
  if (asked_ > 1) {
    const auto found = lists(known);
    if (found.not_clear) {
      const auto& item = items_[*found.not_clear];
      throw faces::refusal("list-not-clear", "argument " + item.name, words_.list(argument(item).name));
    }
    for (std::size_t i = 0; i < items_.size(); ++i) {
      if (found.by_elements[i]) items_[i].cut = Cut::kElements;
    }
  }
  find();
  std::vector<std::int64_t> sizes;
  for (const auto number : split_) sizes.push_back(size(items_[number]));
  Pieces pieces(sizes, asked_, needs_all_);
  if (pieces.misfit()) {
    const auto &misfit = items_[split_[pieces.misfit()->misfit]], &beside = items_[split_[pieces.misfit()->beside]];
    throw faces::refusal("uneven", words(misfit), asked_, words(beside), words_.whole);
  }
  if (pieces.microbatches() > 1) require_no_offsets(known.rows);
  pieces_ = std::move(pieces);
}

// Finds what is cut, but nothing inside of lists that are cut themselves.
void BatchSplitter::find() {
  std::set<std::tuple<std::uintptr_t, std::int64_t>> seen;
  const auto is_new = [&](const Item& item, std::int64_t axis) {
    return item.identity == 0 || seen.emplace(item.identity, axis).second;
  };
  for (std::size_t i = 0; i < items_.size();) {
    const auto& item = items_[i];
    require_pieces(item);
    const bool is_list = item.cut == Cut::kElements;
    if (is_list || has_rows(item)) {
      take(i, is_list ? Cut::kElements : Cut::kRows);
      if (is_new(item, is_list ? 0 : argument(item).axis)) split_.push_back(i);
    } else if (item.kind == Kind::kSelfSlicing) {
      take(i, Cut::kItself);
      self_slicing_.push_back(i);
    }
    i = is_list ? item.part.end : i + 1;
  }
}

void BatchSplitter::take(std::size_t number, Cut cut) {
  items_[number].cut = cut;
  for (auto around = items_[number].parent; around != kNone && items_[around].cut == Cut::kWhole;
       around = items_[around].parent) {
    items_[around].cut = Cut::kWithin;
  }
}

void BatchSplitter::require_pieces(const Item& item) const {
  const auto who = "argument " + item.name;
  const auto no_pieces = [&](const char* remedy) {
    return base::UsageError(
        base::str(who, " is a ", item.type, ", which has no pieces: ", remedy, ", or ", words_.whole));
  };
  if (item.kind == Kind::kReadOnce && asked_ > 1) {
    throw base::UsageError(
        base::str(who, " is a ", item.type, ", which the first of ", asked_,
                  " microbatches would use up: read a batch from it in the loop, and call the step function with its "
                  "tensors"),
        base::Code{"step-iterator"});
  }
  if (item.kind == Kind::kPacked) {
    throw no_pieces("pass the padded tensor and the lengths and pack them in the step function");
  }
  if (!has_rows(item)) return;
  if (!item.type.empty()) throw no_pieces("pass a dense one");
  const auto dims = static_cast<std::int64_t>(item.shape.size()), axis = argument(item).axis;
  if (axis < -dims || axis >= dims) throw faces::refusal("no-axis", words(item), axis);
}

void BatchSplitter::require_no_offsets(std::set<std::string>& known_rows) const {
  std::vector<std::int64_t> lengths;
  for (const auto number : split_) lengths.push_back(size(items_[number]));
  for (const auto number : split_) {
    const auto& item = items_[number];
    if (item.kind != Kind::kTensor || argument(item).is_said || !item.values.defined()) continue;
    const bool is_read_once = !devices::is_host(item.values);
    if (is_read_once && known_rows.contains(item.name)) continue;
    if (looks_like_offsets(item.values, lengths, names_offsets(item.name))) {
      throw faces::refusal("offsets", words(item), words_.offsets, words_.rows);
    }
    if (is_read_once) known_rows.insert(item.name);
  }
}

std::int64_t BatchSplitter::size(const Item& item) const {
  if (item.kind == Kind::kList) return item.part.size;
  const auto axis = argument(item).axis;
  return item.shape[axis < 0 ? axis + item.shape.size() : axis];
}

std::vector<BatchSplitter::Remark> BatchSplitter::remarks() const {
  std::vector<Remark> remarks;
  if (pieces_.microbatches() < asked_) remarks.push_back(Remark::kFewer);
  if (pieces_.microbatches() == 1 || arguments_.empty()) return remarks;
  remarks.push_back(split_.empty() && self_slicing_.empty() ? Remark::kNothing : Remark::kSplit);
  return remarks;
}

std::string BatchSplitter::text(Remark remark) const {
  switch (remark) {
    case Remark::kFewer:
      return faces::said("fewer-microbatches", pieces_.microbatches(), asked_);
    case Remark::kNothing:
      return faces::said("nothing-to-split", pieces_.microbatches(), words_.nothing);
    case Remark::kSplit:
      break;
  }
  return base::str("split into ", pieces_.microbatches(), " microbatches: ", summary(), whole_lists(), ". ",
                   words_.otherwise);
}

std::string BatchSplitter::words(const Item& item) const {
  if (item.kind == Kind::kList) return base::str("argument ", item.name, " with ", size(item), " samples");
  return base::str("argument ", item.name, " of shape ", words_.shape(item.shape));
}

// Lists what is cut, and how: the first few.
std::string BatchSplitter::summary() const {
  constexpr std::size_t kNamed = 8;
  std::vector<std::string> rows;
  for (const auto number : split_) {
    const auto& item = items_[number];
    rows.push_back(item.kind == Kind::kList
                       ? faces::fill(words_.list_row, {item.name, base::str(size(item))}) + " by elements"
                       : base::str(faces::fill(words_.tensor_row, {item.name, words_.shape(item.shape)}),
                                   " along axis ", argument(item).axis));
  }
  for (const auto number : self_slicing_) {
    rows.push_back(base::str(items_[number].name, " (", items_[number].type, ".smp_slice)"));
  }
  const auto text = base::joined(std::span(rows).first(std::min(rows.size(), kNamed)));
  return rows.size() > kNamed ? base::str(text, " and ", rows.size() - kNamed, " more") : text;
}

// Lists as long as the batch that are not cut.
std::string BatchSplitter::whole_lists() const {
  constexpr int kDeepest = 2;
  std::set<std::int64_t> sizes;
  for (const auto number : split_) sizes.insert(size(items_[number]));
  std::vector<std::string> rows;
  for (std::size_t i = 0; i < items_.size();) {
    const auto& item = items_[i];
    const bool is_whole = item.kind == Kind::kList && item.cut == Cut::kWhole && item.depth < kDeepest;
    if (is_whole && sizes.contains(size(item))) {
      rows.push_back(faces::fill(words_.whole_row, {item.name, base::str(size(item))}));
    }
    i = item.cut == Cut::kElements ? item.part.end : i + 1;
  }
  return rows.empty() ? "" : "; whole to each: " + base::joined(rows);
}

}  // namespace lamina::pipeline
