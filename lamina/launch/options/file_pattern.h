// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "lamina/launch/options/layout.h"

namespace lamina::launch {

// A file name with the fields {rank}, {local_rank}, {world_size}, {node_rank} and {local_world_size}, filled with zeros
// to three digits by {rank:03}; `{{` and `}}` are braces.
class FilePattern {
 public:
  // `option` names it in errors. Throws ConfigError on a field that is not known.
  FilePattern(const std::string& text, const std::string& option);

  std::string name(const Layout& layout, int local_rank) const;

  // True where two ranks of the job would share a file, the first of each machine apart, which has none.
  bool shared(const Layout& layout) const;

 private:
  struct Piece {
    std::string text;   // as it is, or
    std::string field;  // the value of this
    int width = 0;
  };
  std::vector<Piece> pieces_;
};

}  // namespace lamina::launch
