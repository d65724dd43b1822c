// SPDX-License-Identifier: Apache-2.0
#include "lamina/transport/ucx/worker.h"

#include <ifaddrs.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/statvfs.h>

#include <cstdlib>
#include <memory>

#include "lamina/base/error.h"
#include "lamina/base/log.h"
#include "lamina/base/str.h"

namespace lamina::transport::ucx {
namespace {

constexpr std::uint64_t kSharedMemoryPerRank = std::uint64_t(64) << 20;

// Without an IPv4 address UCX has no tcp transport, and warns if one names it.
bool has_ipv4() {
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return true;
  bool found = false;
  for (const ifaddrs* at = all; at != nullptr; at = at->ifa_next) {
    found |= at->ifa_addr != nullptr && at->ifa_addr->sa_family == AF_INET;
  }
  ::freeifaddrs(all);
  return found;
}

// The transports that UCX should not use, a comma-separated list.
std::string left_out(const Reach& reach) {
  std::string names = reach.shared && has_ipv4() ? "cma,tcp" : "cma";  // for cma see [Note: offers]
  struct statvfs room{};
  if (::statvfs("/dev/shm", &room) != 0) return names;
  const std::uint64_t free_bytes = std::uint64_t(room.f_bavail) * room.f_frsize;
  if (free_bytes >= kSharedMemoryPerRank * static_cast<std::uint64_t>(reach.size)) return names;
  base::log_warning(base::str("only ", free_bytes >> 20, " MiB free in /dev/shm for ", reach.size,
                              " ranks: UCX uses System V shared memory instead"));
  return names + ",posix";
}

// True where UCX may use tcp, and no other transport that has a network: a list names the transports that it takes or,
// after "^", those that it does not take.
bool only_tcp(const std::string& wanted) {
  const bool taken = !wanted.starts_with('^');
  const std::string list = "," + wanted.substr(taken ? 0 : 1);
  const auto names = [&](const char* begin) { return list.find(begin) != std::string::npos; };
  const bool others = names(",rc") || names(",ud") || names(",dc") || names(",ib") || names(",all");
  return names(",tcp") == taken && others != taken;
}

using Config = std::unique_ptr<ucp_config_t, decltype(&ucp_config_release)>;

Config configure(const Reach& reach) {
  ucp_config_t* read = nullptr;
  check(ucp_config_read(nullptr, nullptr, &read), "read its configuration");
  Config config(read, &ucp_config_release);
  const char* wanted = std::getenv("UCX_TLS");
  if (wanted == nullptr) check(ucp_config_modify(read, "TLS", ("^" + left_out(reach)).c_str()), "choose transports");
  const bool has_network = wanted == nullptr ? !reach.shared : only_tcp(wanted);
  if (reach.loopback && has_network && std::getenv("UCX_NET_DEVICES") == nullptr) {
    check(ucp_config_modify(read, "NET_DEVICES", "lo"), "choose networks");
  }
  return config;
}

}  // namespace

void check(ucs_status_t status, const char* what) {
  if (status != UCS_OK) throw base::Error(base::str("UCX cannot ", what, ": ", ucs_status_string(status)));
}

Worker::Worker(const Reach& reach) {
  const Config config = configure(reach);
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_ESTIMATED_NUM_EPS;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  params.estimated_num_eps = static_cast<std::size_t>(reach.size);
  check(ucp_init(&params, config.get(), &context_), "start");
  ucp_worker_params_t worker{};
  worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  check(ucp_worker_create(context_, &worker, &worker_), "make a worker");
  check(ucp_worker_get_efd(worker_, &event_fd_), "wake its worker");
}

Worker::~Worker() {
  if (leaked_) return;
  if (worker_ != nullptr) ucp_worker_destroy(worker_);
  if (context_ != nullptr) ucp_cleanup(context_);
}

bool Worker::knows(ucs_memory_type_t type) const {
  ucp_context_attr_t known{};
  known.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES;
  check(ucp_context_query(context_, &known), "tell what memory it knows");
  return type < UCS_MEMORY_TYPE_LAST && (known.memory_types & UCS_BIT(type)) != 0;
}

bool Worker::registers(void* address, std::size_t size, ucs_memory_type_t type) const {
  ucp_mem_map_params_t params{};
  params.field_mask =
      UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
  params.address = address;
  params.length = size;
  params.memory_type = type;
  ucp_mem_h memory = nullptr;
  if (ucp_mem_map(context_, &params, &memory) != UCS_OK) return false;
  ucp_mem_unmap(context_, memory);
  return true;
}

std::string Worker::address(bool near) const {
  ucp_worker_attr_t own{};
  own.field_mask = UCP_WORKER_ATTR_FIELD_ADDRESS | UCP_WORKER_ATTR_FIELD_ADDRESS_FLAGS;
  own.address_flags = near ? 0 : UCP_WORKER_ADDRESS_FLAG_NET_ONLY;
  check(ucp_worker_query(worker_, &own), "tell its address");
  std::string bytes(reinterpret_cast<const char*>(own.address), own.address_length);
  ucp_worker_release_address(worker_, own.address);
  return bytes;
}

ucs_status_t Worker::connect(const std::string& address, ucp_ep_h& endpoint) {
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
  params.address = reinterpret_cast<const ucp_address_t*>(address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_NONE;
  return ucp_ep_create(worker_, &params, &endpoint);
}

bool Worker::announced(std::chrono::milliseconds patience) const {
  pollfd ready{event_fd_, POLLIN, 0};
  return ::poll(&ready, 1, static_cast<int>(patience.count())) > 0;
}

bool Worker::arm() {
  const ucs_status_t status = ucp_worker_arm(worker_);
  if (status == UCS_ERR_BUSY) return false;
  check(status, "sleep");
  return true;
}

}  // namespace lamina::transport::ucx
