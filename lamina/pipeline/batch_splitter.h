// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "lamina/pipeline/lists.h"
#include "lamina/pipeline/pieces.h"

namespace lamina::pipeline {

// How a face writes what is said of a batch, as its users write it.
struct SplitWords {
  std::string (*shape)(at::IntArrayRef sizes);
  std::string_view whole;                            // how to keep an argument whole
  std::string (*list)(const std::string& argument);  // how to say of a list in it how it is cut
  std::string_view offsets;                          // how to keep offsets whole, with what they point into
  std::string_view rows;                             // how to say that a tensor has a value for each row
  std::string_view nothing;                          // how to say that all is to be whole
  std::string_view otherwise;                        // a sentence on how to split otherwise
  // Parts of a summary, with places for a name, and for the shape, the samples or the elements.
  std::string_view tensor_row, list_row, whole_row;
};

// Decisions on a step function's batches, by the names of what is in them: made in one batch, they hold for those after
// it.
struct KnownParts {
  std::map<std::string, BatchPart::Known> lists;  // how they are cut
  std::set<std::string> rows;  // tensors of devices that hold no offsets: to look again would be a wait in each step
};

// Splits the arguments of one call of a step function. A face first walks them from outside in, where each value gets
// the next number. Then `decide` says what is cut, and how: [Note: uneven batches] in pieces.h, [Note: lists of
// samples] in lists.h, [Note: offsets] in offsets.h. A value that is given twice counts once. At last the face makes
// the parts of each microbatch, as `cut` and `piece` say. One thread at a time.
class BatchSplitter {
 public:
  // `needs_all`: see Pieces. The words are the face's, and outlive this.
  BatchSplitter(int microbatches, bool needs_all, const SplitWords& words);

  // Begins the next argument: its tensors are cut along that axis. `is_said`: the user has said so.
  void begin_argument(std::string name, std::int64_t axis, bool is_said);

  // A value inside of it. `name` is its path, "x['mask'][0]". Only identities that are equal and above 0 mean one
  // value.
  void add_tensor(std::string name, const at::Tensor& tensor);
  struct Array {
    std::vector<std::int64_t> shape;
    std::int64_t dtype;  // any number that says it
    std::uintptr_t identity = 0;
    at::Tensor values;  // defined for integers that may be offsets
  };
  void add_array(std::string name, Array array);
  void add_self_slicing(std::string name, const std::string& type);  // it makes its pieces itself
  void add_read_once(std::string name, const std::string& type);     // an iterator over batches
  void add_packed(std::string name, const std::string& type);        // sequences without rows
  void add_other(std::string name);

  // One that holds the values up to its `end`. A tuple of plain numbers is a size, and stays whole.
  void begin_list(std::string name, std::int64_t size, bool is_size, std::uintptr_t identity = 0);
  void begin_container(std::string name);
  void end();

  // The lists that hold an element for each sample, by numbers of values.
  Lists lists(KnownParts& known);
  // Throws base::UsageError for what has no pieces, does not fit beside the others, or is not clear.
  void decide(KnownParts& known);

  // From here on: after `decide`.
  const Pieces& pieces() const { return pieces_; }
  enum class Cut {
    kWhole,     // goes to every microbatch as it is
    kRows,      // of a tensor or an array, along its axis
    kElements,  // of a list
    kItself,    // makes its pieces itself
    kWithin,    // holds what is cut
  };
  Cut cut(std::size_t number) const { return items_[number].cut; }
  std::int64_t axis(std::size_t number) const { return argument(items_[number]).axis; }  // as given
  // The part that a microbatch gets of one that is cut by rows or elements.
  Pieces::Piece piece(std::size_t number, base::Microbatch microbatch) const {
    return pieces_.of(size(items_[number]), microbatch);
  }
  const std::string& name(std::size_t number) const { return items_[number].name; }
  std::size_t behind(std::size_t number) const { return items_[number].part.end; }  // it, and what is in it

  // Remarks on this batch; each is to be told once for a step function.
  enum class Remark { kFewer, kSplit, kNothing };
  std::vector<Remark> remarks() const;
  std::string text(Remark remark) const;

 private:
  static constexpr auto kNone = std::numeric_limits<std::size_t>::max();
  enum class Kind { kTensor, kList, kSelfSlicing, kReadOnce, kPacked, kOther };
  struct Argument {
    std::string name;
    std::int64_t axis;
    bool is_said;
  };
  struct Item {
    std::string name;
    std::size_t argument, parent;
    int depth;
    Kind kind = Kind::kOther;
    BatchPart part = {};
    std::vector<std::int64_t> shape = {};
    std::uintptr_t identity = 0;
    at::Tensor values = {};
    std::string type = {};  // as errors name it
    Cut cut = Cut::kWhole;
  };

  Item& add(std::string name, Kind kind);
  void take(std::size_t number, Cut cut);
  void find();
  void require_pieces(const Item& item) const;
  void require_no_offsets(std::set<std::string>& known_rows) const;
  const Argument& argument(const Item& item) const { return arguments_[item.argument]; }
  bool has_rows(const Item& item) const { return item.kind == Kind::kTensor && !item.shape.empty(); }
  std::int64_t size(const Item& item) const;
  std::string words(const Item& item) const;
  std::string summary() const;
  std::string whole_lists() const;

  int asked_;
  bool needs_all_;
  const SplitWords& words_;
  std::vector<Argument> arguments_;
  std::vector<Item> items_;
  std::vector<std::size_t> open_;   // containers around the next value
  std::vector<std::size_t> split_;  // numbers of tensors, arrays and lists that are cut, each value once
  std::vector<std::size_t> self_slicing_;
  Pieces pieces_;
};

}  // namespace lamina::pipeline
