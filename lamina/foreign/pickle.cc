// SPDX-License-Identifier: Apache-2.0
#include "lamina/foreign/pickle.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <unordered_map>

#include "lamina/archive/budget.h"
#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::foreign {

using archive::Budget;

const PickleValue* PickleValue::find(std::string_view key) const {
  // A hostile object has itself as its state: only a dict has entries there.
  const auto* entries = type == PickleValue::Type::kObject && items.size() > 1 ? items[1] : this;
  if (entries->type != PickleValue::Type::kDict) return nullptr;
  const auto& all = entries->items;
  for (std::size_t i = 0; i + 1 < all.size(); i += 2) {
    if (all[i]->type == PickleValue::Type::kText && all[i]->text == key) return all[i + 1];
  }
  return nullptr;
}

const PickleValue* PickleValue::argument(std::size_t index) const {
  if (type != PickleValue::Type::kObject || index >= items[0]->items.size()) return nullptr;
  return items[0]->items[index];
}

// The stack machine that a pickle is written for.
class Pickle::Machine {
 public:
  Machine(std::string_view bytes, const std::function<bool(std::string_view)>& allowed, std::deque<PickleValue>& values)
      : bytes_(bytes), allowed_(allowed), values_(values), budget_(bytes.size(), std::uint64_t{64} << 20) {}

  const PickleValue* run() {
    while (true) {
      const auto opcode = static_cast<unsigned char>(take(1)[0]);
      if (opcode == '.') return pop();
      if (!(number(opcode) || text(opcode) || container(opcode) || memo(opcode) || call(opcode))) {
        refuse(base::str("opcode ", static_cast<int>(opcode), ", which torch does not write"));
      }
    }
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    throw base::FormatError(base::str("the pickle has at byte ", at_ == 0 ? 0 : at_ - 1, " ", what));
  }

  std::string_view take(std::uint64_t count) {
    if (count > bytes_.size() - at_) refuse("fewer bytes than it says");
    const auto taken = bytes_.substr(at_, count);
    at_ += count;
    return taken;
  }
  template <class T>
  T little() {
    T value;
    const auto bytes = take(sizeof(T));
    std::memcpy(&value, bytes.data(), bytes.size());
    return value;
  }
  std::string_view line() {
    const auto end = bytes_.find('\n', at_);
    if (end == std::string_view::npos) refuse("a line without an end");
    const auto taken = take(end - at_);
    take(1);
    return taken;
  }

  PickleValue& make(PickleValue::Type type) {
    constexpr std::uint64_t kStack = 2 * sizeof(void*);
    budget_.take(sizeof(PickleValue) + kStack);
    return values_.emplace_back(PickleValue{.type = type});
  }
  PickleValue& push(PickleValue::Type type) {
    auto& value = make(type);
    stack_.push_back(&value);
    return value;
  }
  void push_text(PickleValue::Type type, std::string_view text) {
    budget_.take(text.size());
    push(type).text = text;
  }
  PickleValue* pop() {
    if (stack_.empty() || (!marks_.empty() && marks_.back() == stack_.size()))
      refuse("a value taken from an empty stack");
    auto* value = stack_.back();
    stack_.pop_back();
    return value;
  }
  PickleValue& top() {
    auto* value = pop();
    stack_.push_back(value);
    return *value;
  }
  std::vector<const PickleValue*> pop_to_mark() {
    if (marks_.empty()) refuse("no mark");
    const auto begin = stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back());
    std::vector<const PickleValue*> items(begin, stack_.end());
    stack_.erase(begin, stack_.end());
    marks_.pop_back();
    return items;
  }
  void append(PickleValue& to, const std::vector<const PickleValue*>& items) {
    budget_.take(2 * items.size() * sizeof(void*));
    to.items.insert(to.items.end(), items.begin(), items.end());
  }

  bool number(unsigned char opcode) {
    const auto integer = [&](std::int64_t value) {
      push(PickleValue::Type::kInteger).integer = value;
      return true;
    };
    switch (opcode) {
      case 'N':
        push(PickleValue::Type::kNone);
        return true;
      case 0x88:
      case 0x89:
        push(PickleValue::Type::kBool).integer = opcode == 0x88 ? 1 : 0;
        return true;
      case 'J':
        return integer(little<std::int32_t>());
      case 'K':
        return integer(little<std::uint8_t>());
      case 'M':
        return integer(little<std::uint16_t>());
      case 0x8a: {  // of so many bytes, in two's complement
        const auto digits = take(little<std::uint8_t>());
        if (digits.size() > sizeof(std::int64_t)) refuse("an integer of more than 64 bits");
        std::int64_t value = !digits.empty() && (digits.back() & 0x80) != 0 ? -1 : 0;
        std::memcpy(&value, digits.data(), digits.size());
        return integer(value);
      }
      case 'G': {
        std::uint64_t bits = 0;
        for (const auto byte : take(sizeof(bits))) bits = bits << 8 | static_cast<unsigned char>(byte);
        push(PickleValue::Type::kFloat).real = std::bit_cast<double>(bits);
        return true;
      }
      default:
        return false;
    }
  }

  bool text(unsigned char opcode) {
    switch (opcode) {
      case 0x8c:
        push_text(PickleValue::Type::kText, take(little<std::uint8_t>()));
        return true;
      case 'X':
        push_text(PickleValue::Type::kText, take(little<std::uint32_t>()));
        return true;
      case 0x8d:
        push_text(PickleValue::Type::kText, take(little<std::uint64_t>()));
        return true;
      case 'C':
        push_text(PickleValue::Type::kBytes, take(little<std::uint8_t>()));
        return true;
      case 'B':
        push_text(PickleValue::Type::kBytes, take(little<std::uint32_t>()));
        return true;
      default:
        return false;
    }
  }

  void push_tuple(std::size_t count) {
    std::vector<const PickleValue*> items;
    for (; count > 0; --count) items.push_back(pop());
    std::ranges::reverse(items);
    append(push(PickleValue::Type::kTuple), items);
  }
  // Adds to the list or the dict at the top. Items of an object, of a class that is like one, are not kept.
  void add_items(PickleValue::Type type, const char* what, const std::vector<const PickleValue*>& items) {
    auto& value = top();
    if (value.is(PickleValue::Type::kObject)) return;
    if (!value.is(type)) refuse(what);
    append(value, items);
  }

  bool container(unsigned char opcode) {
    switch (opcode) {
      case '(':
        marks_.push_back(stack_.size());
        budget_.take(2 * sizeof(std::size_t));
        return true;
      case ']':
        push(PickleValue::Type::kList);
        return true;
      case ')':
        push(PickleValue::Type::kTuple);
        return true;
      case '}':
        push(PickleValue::Type::kDict);
        return true;
      case 't': {
        const auto items = pop_to_mark();
        append(push(PickleValue::Type::kTuple), items);
        return true;
      }
      case 0x85:
      case 0x86:
      case 0x87:
        push_tuple(opcode - 0x84);
        return true;
      case 'a': {
        const auto* item = pop();
        add_items(PickleValue::Type::kList, "an item of no list", {item});
        return true;
      }
      case 'e': {
        const auto items = pop_to_mark();
        add_items(PickleValue::Type::kList, "items of no list", items);
        return true;
      }
      case 's': {
        const auto *value = pop(), *key = pop();
        add_items(PickleValue::Type::kDict, "an entry of no dict", {key, value});
        return true;
      }
      case 'u': {
        const auto items = pop_to_mark();
        if (items.size() % 2 != 0) refuse("a key without a value");
        add_items(PickleValue::Type::kDict, "entries of no dict", items);
        return true;
      }
      case '0':
        pop();
        return true;
      default:
        return false;
    }
  }

  void remember(std::uint64_t key) {
    constexpr std::uint64_t kNode = 64;
    budget_.take(kNode);
    memo_[key] = &top();
  }
  bool recall(std::uint64_t key) {
    const auto found = memo_.find(key);
    if (found == memo_.end()) refuse("a value that was not there before");
    budget_.take(2 * sizeof(void*));
    stack_.push_back(found->second);
    return true;
  }
  bool memo(unsigned char opcode) {
    switch (opcode) {
      case 0x80:
        little<std::uint8_t>();  // the protocol
        return true;
      case 0x95:
        little<std::uint64_t>();  // the size of a frame
        return true;
      case 'q':
        remember(little<std::uint8_t>());
        return true;
      case 'r':
        remember(little<std::uint32_t>());
        return true;
      case 0x94:
        remember(memo_.size());
        return true;
      case 'h':
        return recall(little<std::uint8_t>());
      case 'j':
        return recall(little<std::uint32_t>());
      default:
        return false;
    }
  }

  void push_global(std::string_view module, std::string_view name) {
    const auto whole = base::str(module, ".", name);
    if (!allowed_(whole)) {
      throw base::FormatError(base::str("the pickle names ", whole.substr(0, 200),
                                        ", which is not among what may be read: nothing of it was executed"));
    }
    push_text(PickleValue::Type::kGlobal, whole);
  }
  // An object of a class with these arguments. An ordered dict is as good as a dict.
  void push_object(const PickleValue& of, const PickleValue& arguments) {
    if (!of.is(PickleValue::Type::kGlobal) || !arguments.is(PickleValue::Type::kTuple))
      refuse("a call of what is no global");
    if (of.text == "collections.OrderedDict" && arguments.items.empty()) {
      push(PickleValue::Type::kDict);
      return;
    }
    push_text(PickleValue::Type::kObject, of.text);
    append(top(), {&arguments});
  }

  bool call(unsigned char opcode) {
    switch (opcode) {
      case 'c': {
        const auto module = line();
        push_global(module, line());
        return true;
      }
      case 0x93: {
        const auto *name = pop(), *module = pop();
        if (!name->is(PickleValue::Type::kText) || !module->is(PickleValue::Type::kText))
          refuse("a global without a name");
        push_global(module->text, name->text);
        return true;
      }
      case 'R':
      case 0x81: {
        const auto *arguments = pop(), *of = pop();
        push_object(*of, *arguments);
        return true;
      }
      case 'b': {
        const auto* state = pop();
        auto& object = top();
        if (object.is(PickleValue::Type::kDict)) return true;  // attributes of an ordered dict
        if (!object.is(PickleValue::Type::kObject) || object.items.size() != 1) refuse("a state of what is no object");
        append(object, {state});
        return true;
      }
      case 'Q': {
        const auto* id = pop();
        append(push(PickleValue::Type::kPersistent), {id});
        return true;
      }
      default:
        return false;
    }
  }

  const std::string_view bytes_;
  const std::function<bool(std::string_view)>& allowed_;
  std::deque<PickleValue>& values_;
  Budget budget_;
  std::uint64_t at_ = 0;
  std::vector<PickleValue*> stack_;
  std::vector<std::size_t> marks_;
  std::unordered_map<std::uint64_t, PickleValue*> memo_;
};

Pickle::Pickle(std::string_view bytes, const std::function<bool(std::string_view)>& allowed)
    : root_(Machine(bytes, allowed, values_).run()) {}
Pickle::~Pickle() = default;

}  // namespace lamina::foreign
