// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

// Python's pickles as data. What a pickle calls is not called: it becomes an object that says what would have been, and
// only what the reader allows may be named at all. The opcodes are those of protocols 2 to 5 that torch writes, after
// CPython's Lib/pickletools.py.
namespace lamina::foreign {

struct PickleValue {
  enum class Type {
    kNone,
    kBool,
    kInteger,
    kFloat,
    kText,
    kBytes,
    kList,
    kTuple,
    kDict,
    kGlobal,
    kObject,
    kPersistent
  };

  Type type = Type::kNone;
  std::int64_t integer = 0;  // also of a bool
  double real = 0;
  std::string text;  // of a text, bytes; of a global "torch.Size", of an object that of its class
  // The items of a list or a tuple; keys and values of a dict, in turn; what an object was made with, as a tuple, and
  // then its state; the id of a persistent one.
  std::vector<const PickleValue*> items;

  bool is(Type other) const { return type == other; }
  bool is_object(std::string_view of) const { return type == Type::kObject && text == of; }
  // An entry of a dict, or of an object's state; nullptr where there is none.
  const PickleValue* find(std::string_view key) const;
  const PickleValue* argument(std::size_t index) const;  // of an object; nullptr where there is none
};

// The values of a pickle, all as long as this lives.
class Pickle {
 public:
  // `allowed` is asked of each global. Any bytes are safe, and take no more than twice their number of memory, and 64
  // MiB. Throws base::FormatError where they are no pickle, or it names what is not allowed.
  Pickle(std::string_view bytes, const std::function<bool(std::string_view)>& allowed);
  ~Pickle();
  Pickle(const Pickle&) = delete;

  const PickleValue& root() const { return *root_; }

 private:
  class Machine;

  std::deque<PickleValue> values_;
  const PickleValue* root_ = nullptr;
};

}  // namespace lamina::foreign
