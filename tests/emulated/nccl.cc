// SPDX-License-Identifier: Apache-2.0
// A library with NCCL's interface for emulated devices, over files: for tests of what is called, in which order, and of
// what becomes of errors. An operation is a task of the stream that it is given; a member that does not come, or ends,
// leaves it spinning until the communicator is aborted. It never blocks a caller, as a communicator that is not to.
//
//   STANDIN_NCCL_VERSION  the number of its version
//   STANDIN_NCCL_LOG      each rank appends its calls to this name and its number: "AllReduce 3 7 0" (count, type, ...)
//   STANDIN_NCCL_REFUSES  a call, such as "AllReduce", that is an invalid usage
//   STANDIN_NCCL_BREAKS   a call whose operation leaves the communicator with an error when it has run
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/emulated/device.h"
#include "tests/emulated/stream.h"
#include "tests/emulated/tensors.h"

namespace {

namespace fs = std::filesystem;

constexpr int kSuccess = 0, kInvalidArgument = 4, kInvalidUsage = 5, kRemoteError = 6, kInProgress = 7;
constexpr int kSum = 0, kProduct = 1, kMax = 2, kMin = 3, kMean = 4;

struct UniqueId {
  std::array<char, 128> bytes;
};

struct Config {
  std::size_t size;
  unsigned magic, version;
  int blocking;
};

std::string text_of(const char* variable) {
  const char* given = std::getenv(variable);
  return given == nullptr ? "" : given;
}

// State that a communicator and its tasks share.
struct Group {
  fs::path folder;
  int rank, size;
  std::atomic<bool> aborted = false, breaks = false;
  std::atomic<int> state = kInProgress;

  bool is_over() const { return aborted || emulated::is_stopping(); }

  void put(const std::string& name, const std::string& bytes) const {
    const auto part = folder / (name + "." + std::to_string(rank) + ".part");
    std::ofstream(part, std::ios::binary) << bytes;
    std::error_code gone;  // with all members
    fs::rename(part, folder / name, gone);
  }
  // Empty and not `came` where the group ends first.
  std::string get(const std::string& name, bool& came) const {
    while (!fs::exists(folder / name)) {
      if (is_over()) return came = false, "";
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    std::ifstream in(folder / name, std::ios::binary);
    std::stringstream bytes;
    bytes << in.rdbuf();
    return bytes.str();
  }
};

std::string read_device(const void* address, std::size_t size) {
  return {static_cast<const char*>(emulated::twin(address)), size};
}

void write_device(void* address, const std::string& bytes) {
  std::memcpy(emulated::twin(address), bytes.data(), bytes.size());
}

at::ScalarType scalar_type(int type) {
  static const std::map<int, at::ScalarType> types{{0, at::kChar},   {1, at::kByte},    {2, at::kInt},
                                                   {4, at::kLong},   {6, at::kHalf},    {7, at::kFloat},
                                                   {8, at::kDouble}, {9, at::kBFloat16}};
  return types.at(type);
}

std::size_t bytes_of(std::size_t count, int type) { return count * c10::elementSize(scalar_type(type)); }

// The parts of all members, in their order.
std::string reduced(std::vector<std::string> parts, std::size_t count, int type, int operation) {
  const auto tensor = [&](std::string& bytes) {
    return at::from_blob(bytes.data(), {static_cast<std::int64_t>(count)}, at::TensorOptions(scalar_type(type)));
  };
  auto sum = tensor(parts.front());
  for (std::size_t i = 1; i < parts.size(); ++i) {
    const auto other = tensor(parts[i]);
    if (operation == kSum || operation == kMean) sum.add_(other);
    if (operation == kProduct) sum.mul_(other);
    if (operation == kMax) sum.copy_(at::maximum(sum, other));
    if (operation == kMin) sum.copy_(at::minimum(sum, other));
  }
  if (operation == kMean) sum.div_(static_cast<double>(parts.size()));
  return parts.front();
}

}  // namespace

struct ncclComm {
  std::shared_ptr<Group> group;
  std::string last_error;
  bool has_joined = false;
  std::uint64_t collectives = 0;
  std::map<std::pair<int, int>, std::uint64_t> messages;  // from, to
};

namespace {

// An operation: what it gives before any member's part is awaited, and what it does then.
struct Operation {
  ncclComm* comm;
  void* stream;
  std::function<void(Group& group)> give;
  std::function<void(Group& group)> take;
};

thread_local int depth = 0;
thread_local std::vector<Operation> together;

void log(const ncclComm* comm, const std::string& line) {
  const auto name = text_of("STANDIN_NCCL_LOG");
  if (name.empty()) return;
  const auto rank = comm != nullptr ? std::to_string(comm->group->rank) : text_of("RANK");
  std::ofstream(name + "." + rank, std::ios::app) << line << "\n";
}

template <class... Numbers>
int called(ncclComm* comm, const std::string& call, Numbers... numbers) {
  std::ostringstream line;
  line << call;
  ((line << " " << numbers), ...);
  log(comm, line.str());
  if (text_of("STANDIN_NCCL_BREAKS") == call) {
    comm->group->breaks = true;
    comm->last_error = "the stand-in broke in " + call;
  }
  if (text_of("STANDIN_NCCL_REFUSES") != call) return kSuccess;
  comm->last_error = "the stand-in refuses " + call;
  return kInvalidUsage;
}

void enqueue(const std::vector<Operation>& operations) {
  if (operations.empty()) return;
  emulated::enqueue(emulated::stream_with(operations.front().stream),
                    [operations, group = operations.front().comm->group] {
                      emulated::as_kernel([&] {
                        for (const auto& operation : operations) operation.give(*group);
                        for (const auto& operation : operations) {
                          if (!group->is_over()) operation.take(*group);
                        }
                        if (group->breaks) group->state = kRemoteError;
                      });
                    });
}

int take(Operation operation) {
  if (depth > 0) {
    together.push_back(std::move(operation));
  } else {
    enqueue({std::move(operation)});
  }
  return kSuccess;
}

// A collective: each member gives some bytes, or none, and may take the parts of all.
int collective(ncclComm* comm, void* stream, const void* from, std::size_t size, bool gives, bool takes,
               std::function<void(std::vector<std::string> parts)> end) {
  const auto name = "collective" + std::to_string(comm->collectives++) + ".of";
  return take({comm, stream,
               [=](Group& group) {
                 group.put(name + std::to_string(group.rank), gives ? read_device(from, size) : std::string());
               },
               [=](Group& group) {
                 std::vector<std::string> parts;
                 bool came = true;
                 for (int member = 0; member < group.size && came; ++member) {
                   parts.push_back(group.get(name + std::to_string(member), came));
                 }
                 if (came && takes) end(std::move(parts));
               }});
}

}  // namespace

extern "C" {

int ncclGetVersion(int* version) {
  const auto given = text_of("STANDIN_NCCL_VERSION");
  *version = given.empty() ? 22809 : std::stoi(given);
  return kSuccess;
}

int ncclGetUniqueId(UniqueId* id) {
  log(nullptr, "GetUniqueId");
  auto name = (fs::temp_directory_path() / "standin_nccl_XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr || name.size() >= id->bytes.size()) return kInvalidArgument;
  id->bytes.fill(0);
  std::ranges::copy(name, id->bytes.begin());
  return kSuccess;
}

int ncclCommInitRankConfig(ncclComm** comm, int size, UniqueId id, int rank, Config* config) {
  *comm = new ncclComm{std::make_shared<Group>(id.bytes.data(), rank, size)};
  const bool is_right = config->magic == 0xcafebeef && config->version >= 21400 && config->blocking == 0;
  if (const int result = called(*comm, "CommInitRankConfig", size, rank); result != kSuccess) return result;
  if (!is_right) return kInvalidArgument;
  (*comm)->group->put("member" + std::to_string(rank), std::to_string(emulated::current_device()));
  return kInProgress;
}

int ncclCommGetAsyncError(ncclComm* comm, int* state) {
  auto& group = *comm->group;
  if (!comm->has_joined) {
    bool all = true;
    for (int member = 0; member < group.size; ++member) {
      all = all && fs::exists(group.folder / ("member" + std::to_string(member)));
    }
    comm->has_joined = all;
    if (all) group.state = kSuccess;
  }
  *state = group.state;
  return kSuccess;
}

// A member that leaves last takes the files away.
int ncclCommAbort(ncclComm* comm) {
  log(comm, "CommAbort");
  auto& group = *comm->group;
  group.aborted = true;
  group.put("left" + std::to_string(group.rank), "");
  bool all = true;
  for (int member = 0; member < group.size; ++member) {
    all = all && fs::exists(group.folder / ("left" + std::to_string(member)));
  }
  std::error_code none;
  if (all) fs::remove_all(group.folder, none);
  delete comm;
  return kSuccess;
}

const char* ncclGetErrorString(int result) { return result == kInvalidUsage ? "invalid usage" : "stand-in error"; }

const char* ncclGetLastError(ncclComm* comm) { return comm == nullptr ? "" : comm->last_error.c_str(); }

int ncclGroupStart() {
  ++depth;
  return kSuccess;
}

int ncclGroupEnd() {
  if (--depth > 0) return kSuccess;
  enqueue(std::exchange(together, {}));
  return kInProgress;
}

int ncclAllReduce(const void* from, void* to, std::size_t count, int type, int operation, ncclComm* comm,
                  void* stream) {
  if (const int result = called(comm, "AllReduce", count, type, operation); result != kSuccess) return result;
  return collective(comm, stream, from, bytes_of(count, type), true, true,
                    [=](auto parts) { write_device(to, reduced(std::move(parts), count, type, operation)); });
}

int ncclBroadcast(const void* from, void* to, std::size_t count, int type, int root, ncclComm* comm, void* stream) {
  if (const int result = called(comm, "Broadcast", count, type, root); result != kSuccess) return result;
  return collective(comm, stream, from, bytes_of(count, type), comm->group->rank == root, true,
                    [=](auto parts) { write_device(to, parts[root]); });
}

int ncclReduce(const void* from, void* to, std::size_t count, int type, int operation, int root, ncclComm* comm,
               void* stream) {
  if (const int result = called(comm, "Reduce", count, type, operation, root); result != kSuccess) return result;
  return collective(comm, stream, from, bytes_of(count, type), true, comm->group->rank == root,
                    [=](auto parts) { write_device(to, reduced(std::move(parts), count, type, operation)); });
}

int ncclAllGather(const void* from, void* to, std::size_t count, int type, ncclComm* comm, void* stream) {
  if (const int result = called(comm, "AllGather", count, type); result != kSuccess) return result;
  return collective(comm, stream, from, bytes_of(count, type), true, true, [=](auto parts) {
    std::string all;
    for (const auto& part : parts) all += part;
    write_device(to, all);
  });
}

int ncclReduceScatter(const void* from, void* to, std::size_t count, int type, int operation, ncclComm* comm,
                      void* stream) {
  if (const int result = called(comm, "ReduceScatter", count, type, operation); result != kSuccess) return result;
  const auto size = static_cast<std::size_t>(comm->group->size), rank = static_cast<std::size_t>(comm->group->rank);
  return collective(comm, stream, from, size * bytes_of(count, type), true, true, [=](auto parts) {
    const auto sums = reduced(std::move(parts), size * count, type, operation);
    write_device(to, sums.substr(rank * bytes_of(count, type), bytes_of(count, type)));
  });
}

int ncclSend(const void* from, std::size_t count, int type, int member, ncclComm* comm, void* stream) {
  if (const int result = called(comm, "Send", count, type, member); result != kSuccess) return result;
  const int rank = comm->group->rank;
  const auto number = comm->messages[{rank, member}]++;
  const auto name = "message" + std::to_string(number) + "." + std::to_string(rank) + "to" + std::to_string(member);
  return take(
      {comm, stream, [=](Group& group) { group.put(name, read_device(from, bytes_of(count, type))); }, [](Group&) {}});
}

int ncclRecv(void* to, std::size_t count, int type, int member, ncclComm* comm, void* stream) {
  if (const int result = called(comm, "Recv", count, type, member); result != kSuccess) return result;
  const int rank = comm->group->rank;
  const auto number = comm->messages[{member, -1 - rank}]++;
  const auto name = "message" + std::to_string(number) + "." + std::to_string(member) + "to" + std::to_string(rank);
  return take({comm, stream, [](Group&) {},
               [=](Group& group) {
                 bool came = true;
                 const auto bytes = group.get(name, came);
                 if (came) write_device(to, bytes);
               }});
}

}  // extern "C"
