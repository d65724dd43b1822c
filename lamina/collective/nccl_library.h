// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <string>

// NCCL's library, or one of another vendor with its interface. The engine neither links it nor includes its headers: it
// opens the library when the first group of a device is made, and has here what it calls of it.
namespace lamina::collective::nccl {

// NCCL's numbers.
enum class Result : int { kSuccess = 0, kInvalidArgument = 4, kInvalidUsage = 5, kInProgress = 7 };
enum class Type : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kInt64 = 4,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9
};
enum class Reduction : int { kSum = 0, kProduct = 1, kMax = 2, kMin = 3, kMean = 4 };

struct UniqueId {
  std::array<char, 128> bytes;
};

// The one of version 2.14, the first that has it; later ones take it for what it is.
struct CommConfig {
  std::size_t size = sizeof(CommConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;
};

struct Comm;  // NCCL's

struct Library {
  std::string name;
  std::string why_not;  // a clause; then nothing else is there
  int version = 0;

  Result (*get_unique_id)(UniqueId*);
  Result (*comm_init_rank_config)(Comm**, int size, UniqueId, int rank, CommConfig*);
  Result (*comm_abort)(Comm*);
  Result (*comm_get_async_error)(Comm*, Result*);
  const char* (*get_error_string)(Result);
  const char* (*get_last_error)(Comm*);
  Result (*group_start)();
  Result (*group_end)();
  Result (*all_reduce)(const void* from, void* to, std::size_t count, Type, Reduction, Comm*, void* stream);
  Result (*broadcast)(const void* from, void* to, std::size_t count, Type, int root, Comm*, void* stream);
  Result (*reduce)(const void* from, void* to, std::size_t count, Type, Reduction, int root, Comm*, void* stream);
  Result (*all_gather)(const void* from, void* to, std::size_t count_of_one, Type, Comm*, void* stream);
  Result (*reduce_scatter)(const void* from, void* to, std::size_t count_of_one, Type, Reduction, Comm*, void* stream);
  Result (*send)(const void* from, std::size_t count, Type, int member, Comm*, void* stream);
  Result (*recv)(void* to, std::size_t count, Type, int member, Comm*, void* stream);

  // As "NCCL 2.28.9".
  std::string title() const;
};

// The library for the rank's device: the one that LAMINA_NCCL names, else the one that its type has. Opened once per
// process. `why_not` says why there is none to use; it is "" and `name` too where such devices have none. Throws
// base::ConfigError where LAMINA_NCCL names code that others may have put there.
const Library& library();

}  // namespace lamina::collective::nccl
