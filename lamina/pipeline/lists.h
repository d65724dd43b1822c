// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace lamina::pipeline {

// [Note: lists of samples] A list in a batch is one of two things. It holds tensors with a row for each sample, as [x,
// y] does, and each of them is cut. Or it holds an element for each sample, as pictures of several sizes or names do,
// and is cut itself. Its neighbours decide, outside of lists the first tensor, which has N rows:
//
// - A list of N elements is cut itself if none of the tensors in it has N rows, or if one has no multiple of N. If all
//   have N, each of them is cut. If some have, or if they are in dictionaries, it is not clear.
// - Lists of one length, without a tensor beside them, are cut themselves if tensors of one sort in one of them have
//   different numbers of rows. They also are if one holds no tensors, or dictionaries, and the rows are not as many.
// - A list of tensors with nothing beside it is not clear if three or more of one sort have different numbers of rows.
//   Nor is it if these look like pictures: three dimensions or more, with 1, 3 or 4 rows or fewer rows than elements.
// - A list of dictionaries with nothing beside it is cut itself if tensors of one sort in them have different numbers
//   of rows. Two without anything else in them, and without pictures, are parts of a batch; more are not clear.
// - So are lists of one form in a list with nothing beside it, such as pairs of a picture and its class. The outer list
//   is cut by elements if their tensors are of several sorts, with different numbers of rows.
//
// Lists that hold no tensor are cut with the others if they have as many elements as there are samples. A tuple of
// numbers is a size, and stays whole. Decisions of a list hold for the batches after it, for the last one may be so
// small that it looks like another.

// A part of a batch, in the order of a walk from outside in.
struct BatchPart {
  enum class Kind {
    kTensor,     // one with rows
    kList,       // or a tuple, but no tuple of plain numbers
    kContainer,  // of parts by names; its values are as good as parts of what the container is in
    kOther,
  };
  enum class Known { kNot, kRows, kElements };
  Kind kind = Kind::kOther;
  std::int64_t size = 0;      // rows along the axis that would be cut, or elements
  std::size_t end = 0;        // the number of the first part behind this one and what is in it
  std::int64_t dtype = 0;     // of a tensor
  std::int64_t dims = 0;      // of a tensor
  Known known = Known::kNot;  // of a list: what was said, or decided before
};

struct Lists {
  std::vector<bool> by_elements;         // of each part: whether it is a list of samples
  std::optional<std::size_t> not_clear;  // a list that may be either
};

Lists lists_of_samples(std::span<const BatchPart> parts);

}  // namespace lamina::pipeline
