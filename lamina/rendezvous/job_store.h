// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lamina/base/deadline.h"
#include "lamina/base/ids.h"

namespace c10d {
class Store;
}  // namespace c10d

namespace lamina::rendezvous {

// True where that rank hosts the job's store: the first one does, unless torchrun's agent does.
bool hosts_store(base::Rank rank);

// The beginning of the names in the store of the next time that processes meet to do what `kind` names. The store may
// outlive the job, as torchrun's does. Times are counted from the start of the job on, or from LAMINA_EPOCH: processes
// that come later have that in common with those who stay.
std::string next_meeting(const std::string& kind);
inline constexpr auto kJoin = "join", kGroups = "groups";  // kinds: a session begins; its process groups are made

// The job's key-value store, c10d's TCPStore at MASTER_ADDR:MASTER_PORT. Under torchrun the agent hosts it. Elsewhere
// rank 0 does while this object lives, shared with any other user of the same port in its process. So a script's own
// torch.distributed.init_process_group works before, beside and after. No wait here is longer than the deadline, and
// `check_interrupt` (may be empty, may throw) is called at least every 200 ms.
class JobStore {
 public:
  struct Options {
    std::string host;
    int port = 0;
    bool is_host = false;  // this process hosts the store
    base::Deadline deadline;
    std::function<void()> check_interrupt;
  };

  // Throws base::TimeoutError when nothing answers in time, base::Error when rank 0 cannot listen on the port.
  explicit JobStore(Options options);
  ~JobStore();

  // Setting again what was set is harmless: after a lost connection everything is.
  void set(const std::string& key, const std::string& value);
  std::string get(const std::string& key);  // of a key that exists
  // Sets what is not there yet. Returns what is there then: `value`, also when claimed again, unless another was first.
  std::string claim(const std::string& key, const std::string& value);

  // Waits until all keys exist or the deadline has come; returns those still missing.
  std::vector<std::string> wait(const std::vector<std::string>& keys, base::Deadline deadline);

  void remove(const std::string& key);
  // Removes what processes have left there when they met to begin a session and to make its groups, as often as this
  // one has: that is over.
  void forget_meetings();

  // The store itself, for c10d's own groups; where this process hosts it, it does so as long as that is held.
  c10::intrusive_ptr<c10d::Store> c10d() const;

 private:
  struct Connection;
  void connect();
  bool has(const std::vector<std::string>& keys);
  template <class Operation>
  auto attempt(const Operation& operation);

  const Options options_;
  std::unique_ptr<Connection> connection_;
  std::map<std::string, std::string> written_;
};

}  // namespace lamina::rendezvous
