// SPDX-License-Identifier: Apache-2.0
#include "lamina/transport/ucx/lent_memory.h"

#include "lamina/base/error.h"
#include "lamina/base/log.h"
#include "lamina/base/str.h"
#include "lamina/transport/ucx/worker.h"

namespace lamina::transport::ucx {
namespace {

ucs_memory_type_t type_named(const std::string& name) {
  int type = 0;
  while (type < UCS_MEMORY_TYPE_LAST && name != ucs_memory_type_names[type]) ++type;
  return static_cast<ucs_memory_type_t>(type);
}

}  // namespace

LentMemory::LentMemory(std::optional<devices::Lending> lends, const Worker& worker) {
  if (!lends) return;
  base::internal_check(!lends->memory.empty() && lends->memory.size() < kWordSize,
                       "a kind of memory of no or many letters");
  type_ = type_named(lends->memory);
  if (worker.knows(type_)) {
    lends_ = std::move(lends);
  } else {
    base::log_warning(
        base::str("LAMINA_LANES=1: this UCX knows no memory of kind ", lends->memory,
                  ", so tensors of the device go through the host; `pip install libucx-cu13` (or -cu12) has "
                  "one that knows cuda"));
  }
}

std::string LentMemory::word() const {
  std::string word(kind());
  word.resize(kWordSize, '\0');
  return word;
}

std::string_view LentMemory::kind(std::string_view word) { return word.substr(0, word.find('\0')); }

}  // namespace lamina::transport::ucx
