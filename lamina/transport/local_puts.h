// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lamina/base/ids.h"
#include "lamina/transport/transfer.h"

namespace lamina::transport {

// Puts between ranks of one process. Whoever comes second copies. From any thread.
class LocalPuts {
 public:
  LocalPuts();
  ~LocalPuts();

  std::unique_ptr<Transfer> put(base::Rank from, base::Rank to, Parcel parcel);
  std::unique_ptr<Transfer> post(base::Rank at, base::Rank from, Parcel parcel);
  // Ends what has not ended of transfers with that rank.
  void lose(const base::Loss& loss);

 private:
  struct Meeting;
  struct Table;
  struct End;
  std::unique_ptr<Transfer> come(base::Rank from, base::Rank to, Parcel parcel, bool sends);

  const std::shared_ptr<Table> table_;
};

}  // namespace lamina::transport
