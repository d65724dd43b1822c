// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <random>
#include <tuple>
#include <vector>

namespace lamina::schedule {

// A thing that a work does while it has the slot.
struct Act {
  enum class What : std::uint8_t {
    kCollective,  // of its team
    kCall,        // of a work on another partition; goes on at once
    kRead,        // waits for the value of a work that it has called
    kBackward,    // a step body's forward is over
  };
  What what;
  int work = 0;
};

// A step body, or the forward or backward of a call.
struct Work {
  int partition = 0;
  int module = 0;  // calls of one by one caller keep their order
  bool backward = false;
  int caller = -1;
  std::vector<Act> acts;
  std::vector<int> inputs;  // of other partitions: their values come straight from there
  std::vector<int> after;   // of the same partition: they are over before it begins
};

// Works of one microbatch: the body, then its calls and theirs.
using Program = std::vector<Work>;

// A program drawn by chance: calls within calls, branches whose values are read late, results that go from callee to
// callee, and backwards. Some of these compute their forward again.
class TeamProgram {
 public:
  TeamProgram(int partitions, std::uint64_t seed) : partitions_(partitions), random_(seed) {}

  Program make();

 private:
  using Acts = std::vector<Act>;

  int any(int below) { return static_cast<int>(random_() % static_cast<unsigned>(below)); }
  bool is_large() const { return static_cast<int>(program_.size()) >= kLarge; }
  int add(int partition, int module, bool backward, int caller);
  void act(int work, Act::What what, int of = 0) { program_[work].acts.push_back({what, of}); }
  void call(int work, std::vector<int> inputs);  // by its caller
  void make_forward(int work, int depth);
  Acts make_again(int caller, const Acts& acts);
  void make_backward(int work, const Acts& forward);
  void call_backward(int caller, int forward, std::vector<int> inputs);

  static constexpr int kLarge = 20, kDeep = 3;
  const int partitions_;
  std::mt19937_64 random_;
  Program program_;
  std::map<int, int> backward_of_;
  std::map<std::tuple<int, int, int, bool>, int> latest_;  // by caller, partition, module and direction
};

}  // namespace lamina::schedule
