// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include "lamina/base/fd.h"
#include "lamina/digests/digest.h"

namespace lamina::digests {

// Kinds of tensors that are seen of a run.
enum class RecordedKind : std::uint8_t {
  kInput,           // of a call of a module
  kOutput,          // of it
  kOutputGradient,  // the gradient of an output, in the backward
  kResult,          // what a step function returned, or a loss of which there was a backward outside of one
  kGradient,        // of a parameter before an update, averaged and clipped
  kParameter,       // after an update
  kBuffer,          // after an update
  kState,           // of an optimizer, after an update: "weight exp_avg"
  kGenerator,       // of random numbers, at the end of a step
};
constexpr RecordedKind kLastKind = RecordedKind::kGenerator;

// One tensor that a rank has seen, or its part of one.
struct Seen {
  RecordedKind kind = RecordedKind::kInput;
  std::int64_t step = 0;
  std::int64_t microbatch = -1;  // of this copy of the model; -1: of the step
  std::string name;              // of a module, a parameter or a buffer
  std::int64_t call = 0;         // of the module, in this microbatch
  std::int64_t index = 0;        // of the tensor, among those of the call
  std::int64_t order = 0;        // what this rank saw before has a smaller one
  Digest digest;
};

// A call of a module: its step, microbatch, module and number.
using CallName = std::tuple<std::int64_t, std::int64_t, std::string, std::int64_t>;
inline CallName call_of(const Seen& seen) { return {seen.step, seen.microbatch, seen.name, seen.call}; }

// Surroundings of a call: its results may depend on them as on its inputs.
struct Surroundings {
  std::string modes;            // "training, autocast bfloat16"
  std::uint64_t generator = 0;  // a hash of the random numbers' position before the call
  bool drew = false;            // random numbers in it
};

// Things beside its inputs that a call may depend on, by what they are: "global registry.LOSSES".
struct Reads {
  std::map<std::string, std::string> values;           // in few words, or "#" and a hash
  std::map<std::string, std::vector<Digest>> tensors;  // numbers that lie in them
  std::map<std::string, std::string> users;  // what other modules do with them: "layers.1 on rank 0 writes it"
};

// One rank's part of a run.
struct RankRecording {
  std::int64_t rank = 0;
  std::int64_t world = 1;
  std::int64_t copy = 0;                     // of the model, which it is part of
  std::int64_t partition = 0;                // of it
  std::int64_t slices = 1;                   // into which layers are cut
  std::map<std::string, std::string> about;  // keys of the layout, versions
  std::vector<Seen> seen;
  std::map<CallName, Surroundings> calls;
  std::map<CallName, Reads> reads;  // of the module that was looked at
  std::int64_t steps = 0;           // that have ended
  bool ended = false;               // the recording, as it was meant to: the rank was not killed
};

// The file of one rank: a line of JSON for its beginning, for each call, tensor and end of a step. Lines that are there
// can be read, also when the rank was killed while it wrote the next one. Used by one thread at a time.
class Writer {
 public:
  // Adds to the file where there is one, of an earlier job of this process. Throws base::FileError where it cannot be
  // made, or others have put something in its place.
  Writer(const std::string& folder, const RankRecording& about);
  // Writes into a stream, which outlives it.
  Writer(std::ostream& to, const RankRecording& about);
  ~Writer() { empty(); }
  Writer(const Writer&) = delete;

  // Steps that had ended in it before.
  std::int64_t steps_before() const { return steps_before_; }

  void write(const Seen& seen);
  void write(const CallName& call, const Surroundings& surroundings);
  void write(const CallName& call, const Reads& reads);
  // So many have ended; what was written is in the file. Throws base::FileError where it is not: the disk is full.
  void end_step(std::int64_t steps);
  // As it was meant to, where all that was written is in the file. Throws base::FileError where it is not.
  void end();

 private:
  void begin(const RankRecording& about);
  void add(const std::string& line);
  void empty();  // what waits into the file
  void require_whole() const;

  const std::string path_;
  const base::Fd file_;
  const std::int64_t steps_before_ = 0;
  std::ostream* const to_ = nullptr;  // instead of a file
  std::string waiting_;
  int failed_ = 0;  // the error of a write, after which nothing is written
};

// One rank's, from such a stream. Throws base::FormatError as read_run().
RankRecording read_text(const std::string& text);

// All ranks of a run, the first one first. Throws base::Error where a file cannot be read, base::FormatError where it
// is no recording, one of a later version, or holds numbers that no run has, and where two are of one rank.
std::vector<RankRecording> read_run(const std::string& folder);

}  // namespace lamina::digests
