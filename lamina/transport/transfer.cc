// SPDX-License-Identifier: Apache-2.0
#include "lamina/transport/transfer.h"

#include "lamina/base/str.h"
#include "lamina/device/capabilities.h"

namespace lamina::transport {

void require_dense(const Parcel& parcel) {
  const auto& memory = parcel.memory;
  base::internal_check(
      memory.defined() && devices::is_host(memory) && memory.layout() == at::kStrided && memory.is_contiguous(),
      "a put of memory that is no dense contiguous tensor of the CPU");
}

ParcelEnd end_of(base::Rank rank, const Parcel& parcel) {
  return {rank, static_cast<std::int64_t>(parcel.memory.nbytes()), parcel.meaning};
}

base::DesyncError ends_differ(const std::string& name, const ParcelEnd& sender, const ParcelEnd& receiver) {
  return base::DesyncError(
      base::str(name, ": rank ", sender.rank, " gives ", sender.size_bytes, " bytes (", sender.meaning, "), rank ",
                receiver.rank, " takes ", receiver.size_bytes, " (", receiver.meaning,
                "): all ranks of a group make the same calls, in the same order"),
      base::Code{"step-calls-differ"});
}

base::CancelledError given_up(const std::string& name, base::Rank by) {
  return base::CancelledError(base::str(name, ": rank ", by, " has given it up"));
}

}  // namespace lamina::transport
